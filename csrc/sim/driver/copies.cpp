// Checks and submits copies and fills.

#include "copies.h"

#include <cstring>

#include "card.h"
#include "error.h"
#include "graph.h"
#include "process.h"
#include "stream.h"
#include "submission.h"

namespace backplane::sim::driver {
namespace {

constexpr uint64_t kStaged = 64u << 10;

const char* name_of(bpsim_direction direction) {
  switch (direction) {
    case BPSIM_HOST_TO_DEVICE: return "copy_h2d";
    case BPSIM_DEVICE_TO_HOST: return "copy_d2h";
    case BPSIM_DEVICE_TO_DEVICE: return "copy_d2d";
    case BPSIM_PEER: return "copy_peer";
  }
  return nullptr;
}

// One side of a copy.
struct Side {
  const char* what;
  uintptr_t address;
  Card* card = nullptr;              // null: the host
  std::shared_ptr<const void> keep;  // keeps pinned memory alive

  void* kernel_pointer() const {
    return card ? card->arena().kernel_pointer(address) : reinterpret_cast<void*>(address);
  }
};

bpsim_status check_host(Driver& driver, const char* call, Side& side, uint64_t bytes) {
  const void* const pointer = reinterpret_cast<const void*>(side.address);
  bool freed = false;
  const Pinned::Found pinned = driver.pinned.find(side.address, &freed);
  bool host = side.address != 0 && !freed;
  for (const auto& card : driver.cards)
    host = host && !card->arena().contains(side.address) && !card->arena().contains_kernel(side.address);
  if (!host)
    return fail(BPSIM_INVALID, "%s: %s (%p) must be host memory, but is %s", call, side.what, pointer,
                driver.describe(pointer).c_str());
  if (pinned && bytes > pinned.bytes - (side.address - pinned.start))
    return fail(BPSIM_INVALID, "%s: %s (%p, %s) exceeds its pinned memory of %s", call, side.what, pointer,
                size_text(bytes).c_str(), size_text(pinned.bytes).c_str());
  side.keep = pinned.keep;
  return BPSIM_OK;
}

bpsim_status check_device(Driver& driver, const char* call, Side& side, uint64_t bytes, const Card* wanted) {
  const bpsim_status status = driver.check_device(call, side.what, side.address, bytes, wanted);
  if (status != BPSIM_OK) return status;
  side.card = driver.card_with(side.address);
  if (side.card == nullptr) return fail(BPSIM_INVALID, "%s: %s is in the memory of no card", call, side.what);
  return side.card->is_lost() ? side.card->lost_status() : BPSIM_OK;
}

bpsim_status check_sides(Driver& driver, Stream& stream, bpsim_direction direction, const char* call, Side& to,
                         Side& from, uint64_t bytes) {
  const Card* const own = &stream.card();
  const bool to_host = direction == BPSIM_DEVICE_TO_HOST, from_host = direction == BPSIM_HOST_TO_DEVICE;
  const Card* const wanted = direction == BPSIM_PEER ? nullptr : own;
  bpsim_status status = to_host ? check_host(driver, call, to, bytes) : check_device(driver, call, to, bytes, wanted);
  if (status == BPSIM_OK)
    status = from_host ? check_host(driver, call, from, bytes) : check_device(driver, call, from, bytes, wanted);
  if (status != BPSIM_OK || direction != BPSIM_PEER) return status;
  if (to.card == from.card)
    return fail(BPSIM_INVALID, "%s: both sides are card %d's memory: a copy within a card is copy_d2d", call,
                to.card->index());
  if (to.card != own && from.card != own)
    return fail(BPSIM_INVALID,
                "%s: the stream belongs to card %d, but the copy is from card %d to card %d: use a stream of either",
                call, own->index(), from.card->index(), to.card->index());
  return BPSIM_OK;
}

// If the stream is idle and no check or model needs the copy, copying on the caller's thread is the fastest way.
bool can_copy_here(Driver& driver, Stream& stream) {
  return stream.idle() && stream.card().runs() && !stream.capturing.load() && !driver.faults.armed() &&
         !driver.check_copies.load() && !driver.model.load() && !stream.card().trace.on() && !driver.races.on();
}

}  // namespace

bpsim_status copy(Driver& driver, Stream& stream, bpsim_direction direction, void* to_pointer,
                  const void* from_pointer, uint64_t bytes, bool wait) {
  const char* const call = name_of(direction);
  if (!call) return fail(BPSIM_INVALID, "copy: %d is not a direction", static_cast<int>(direction));
  Card& card = stream.card();
  bpsim_status status = may_submit(stream, call);
  if (status == BPSIM_OK && wait) status = card.may_synchronize("bpsim_copy", &stream);
  if (status != BPSIM_OK) return status;
  if (bytes == 0) return BPSIM_OK;

  Side to{"the destination", reinterpret_cast<uintptr_t>(to_pointer), nullptr, nullptr};
  Side from{"the source", reinterpret_cast<uintptr_t>(from_pointer), nullptr, nullptr};
  status = check_sides(driver, stream, direction, call, to, from, bytes);
  if (status != BPSIM_OK) return status;
  const bool to_host = !to.card, from_host = !from.card;
  const bool pageable = (to_host && !to.keep) || (from_host && !from.keep);
  if (pageable && stream.capturing.load()) {
    std::lock_guard<std::mutex> lock(stream.submitting());
    if (stream.capture)
      return stream.capture->spoil(
          "%s: pageable host memory cannot be part of a capture, because each replay would use it again. Use pinned "
          "memory, or copy outside the capture",
          call);
  }

  Task task;
  task.kind = Task::Kind::Copy;
  task.name = call;
  task.crosses_link = direction != BPSIM_DEVICE_TO_DEVICE;
  task.bytes = static_cast<double>(bytes) * (task.crosses_link ? 1 : 2);
  task.to = to.kernel_pointer();
  task.from = from.kernel_pointer();
  task.size = bytes;
  task.keep = to_host ? to.keep : from.keep;
  if (driver.races.on() && task.keep) {
    const Side& host = to_host ? to : from;
    task.host = {reinterpret_cast<void*>(host.address), bytes, BPSIM_OTHER, static_cast<uint8_t>(to_host)};
    void* const seen = reinterpret_cast<void*>(driver.races.guard().for_copies(host.address));
    if (to_host)
      task.to = seen;
    else
      task.from = seen;
  }
  bool must_wait = wait || pageable;
  if (must_wait && can_copy_here(driver, stream)) {
    card.counts.copies.fetch_add(1, std::memory_order_relaxed);
    std::memmove(task.to, task.from, bytes);
    return BPSIM_OK;
  }
  if (pageable && from_host && bytes <= kStaged && !wait) {
    task.staged.reset(new char[bytes]);
    std::memcpy(task.staged.get(), task.from, bytes);
    task.from = task.staged.get();
    must_wait = false;
  }
  if (must_wait) {
    status = card.may_synchronize("a copy with pageable memory", &stream);
    if (status != BPSIM_OK) return status;
  }
  std::shared_ptr<Ticket> ticket;
  if (must_wait && pageable) task.ticket = ticket = std::make_shared<Ticket>();
  bpsim_range ranges[2];
  size_t count = 0;
  if (!to_host) ranges[count++] = {to_pointer, bytes, BPSIM_OTHER, 1};
  if (!from_host) ranges[count++] = {from_pointer, bytes, BPSIM_OTHER, 0};
  uint64_t sequence = 0;
  status = submit_task(driver, stream, std::move(task), ranges, count, &sequence);
  if (status != BPSIM_OK || !must_wait) return status;
  const HostWait wait_for(driver, stream);
  status = stream.wait(sequence);
  if (status == BPSIM_OK) {
    wait_for.over();
    return card.synchronized_status();
  }
  if (ticket) {
    // The caller owns the memory again once this returns.
    std::lock_guard<std::mutex> lock(ticket->mutex);
    ticket->cancelled = true;
  }
  return status;
}

bpsim_status fill(Driver& driver, Stream& stream, void* to_pointer, int value, uint64_t bytes) {
  bpsim_status status = may_submit(stream, "memset");
  if (status != BPSIM_OK || bytes == 0) return status;
  Side to{"the destination", reinterpret_cast<uintptr_t>(to_pointer), nullptr, nullptr};
  status = check_device(driver, "memset", to, bytes, &stream.card());
  if (status != BPSIM_OK) return status;
  Task task;
  task.kind = Task::Kind::Fill;
  task.name = "memset";
  task.value = static_cast<uint8_t>(value);
  task.bytes = static_cast<double>(bytes);
  task.to = to.kernel_pointer();
  task.size = bytes;
  const bpsim_range range{to_pointer, bytes, BPSIM_OTHER, 1};
  return submit_task(driver, stream, std::move(task), &range, 1, nullptr);
}

}  // namespace backplane::sim::driver
