// Implements the detection of missing synchronization with vector clocks.

#include "races.h"

#include <cstdio>

#include "card.h"
#include "error.h"
#include "graph.h"
#include "process.h"
#include "stream.h"
#include "work.h"

namespace backplane::sim::driver {
namespace {

uint32_t number_of(const Stream& stream) {
  return static_cast<uint32_t>(stream.card().index() * BPSIM_MAX_STREAMS + stream.index());
}

uint32_t card_of(uint32_t stream) { return stream / BPSIM_MAX_STREAMS; }
uint32_t index_of(uint32_t stream) { return stream % BPSIM_MAX_STREAMS; }

}  // namespace

void Races::set(bpsim_races mode) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (mode == BPSIM_RACES_OFF || !on()) {
    history_.clear();
    reported_.clear();
    guard_.forget_all();
  }
  mode_.store(mode);
}

Clock& Races::clock_of(uint32_t stream) {
  if (stream >= clocks_.size()) clocks_.resize(stream + 1);
  return clocks_[stream];
}

void Races::gather(const Task& task, const bpsim_range* ranges, size_t count, std::vector<Touch>* touches,
                   std::vector<PinnedGuard::Flight>* flights) {
  for (size_t i = 0; i < count; ++i)
    if (ranges[i].bytes)
      touches->push_back(
          {reinterpret_cast<uintptr_t>(ranges[i].pointer), ranges[i].bytes, ranges[i].written != 0, task.name});
  if (task.host.bytes == 0) return;
  const uintptr_t first = reinterpret_cast<uintptr_t>(task.host.pointer);
  const bool writes = task.host.written != 0;
  touches->push_back({first, task.host.bytes, writes, task.name});
  flights->push_back({first, first + task.host.bytes, writes, 0, 0, task.name});
}

bpsim_status Races::submit(Stream& stream, const Task& task, const bpsim_range* ranges, size_t count) {
  std::vector<Touch> touches;
  std::vector<PinnedGuard::Flight> flights;
  gather(task, ranges, count, &touches, &flights);
  return submit(stream, touches, flights);
}

bpsim_status Races::submit(Stream& stream, const Graph& graph) {
  std::vector<Touch> touches;
  std::vector<PinnedGuard::Flight> flights;
  for (const Task& task : graph.tasks) gather(task, task.ranges.data(), task.ranges.size(), &touches, &flights);
  return submit(stream, touches, flights);
}

bpsim_status Races::submit(Stream& stream, const std::vector<Touch>& touches,
                           const std::vector<PinnedGuard::Flight>& flights) {
  std::vector<Found> races;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t number = number_of(stream);
    Clock& clock = clock_of(number);
    clock.merge(host_);
    Access access;
    access.stream = number;
    access.position = clock.of(number) + 1;
    for (const Touch& touch : touches) {
      access.name = touch.name;
      const Conflict conflict = history_.conflict(touch.first, touch.bytes, touch.writes, number, clock);
      if (!conflict) continue;
      found_.fetch_add(1);
      races.push_back({conflict, access, touch.writes});
      if (fails()) break;
    }
    if (races.empty() || !fails()) {
      clock.set(number, access.position);
      for (const Touch& touch : touches) {
        access.name = touch.name;
        history_.add(touch.first, touch.bytes, touch.writes, access);
      }
      for (PinnedGuard::Flight flight : flights) {
        flight.stream = number;
        flight.position = access.position;
        guard_.add(flight);
      }
      // Reports each pair of names once, although a missing wait recurs at every step.
      const auto reported = [&](const Found& found) {
        return !reported_.insert({found.conflict.earlier.name, found.access.name}).second;
      };
      races.erase(std::remove_if(races.begin(), races.end(), reported), races.end());
    }
  }
  if (races.empty()) return BPSIM_OK;
  if (fails()) return fail(BPSIM_RACE, "%s", text(races.front()).c_str());
  for (const Found& found : races) std::fprintf(stderr, "backplane sim: %s\n", text(found).c_str());
  return BPSIM_OK;
}

std::string Races::text(const Found& found) const {
  const Access& earlier = found.conflict.earlier;
  const Access& later = found.access;
  const bool reads_after_write = found.conflict.earlier_writes && !found.writes;
  std::string place = "pinned host memory";
  if (Card* const card = driver_.card_with(found.conflict.first)) {
    const Located located = card->allocator().locate(found.conflict.first);
    char text[160];
    std::snprintf(text, sizeof text, "bytes %llu to %llu of the allocation %p of card %d",
                  static_cast<unsigned long long>(found.conflict.first - located.start),
                  static_cast<unsigned long long>(found.conflict.last - located.start),
                  reinterpret_cast<void*>(located.start), card->index());
    place = text;
  }
  char first[96], second[96];
  std::snprintf(first, sizeof first, "stream %u of card %u", index_of(earlier.stream), card_of(earlier.stream));
  std::snprintf(second, sizeof second, "stream %u of card %u", index_of(later.stream), card_of(later.stream));
  std::string text = std::string("missing synchronization: '") + later.name + "' on " + second +
                     (found.writes ? " writes " : " reads ") + place + ", which '" + earlier.name + "' on " + first +
                     (found.conflict.earlier_writes ? " writes" : " reads") + ", and nothing orders the two: ";
  text += reads_after_write ? "it may read the old contents. " : "either may come first. ";
  if (earlier.freed)
    return text + "The memory was freed and allocated again meanwhile, because its use on " + first +
           " was not recorded: record it (tensor.record_stream, bpsim_record_stream)";
  return text + "Record an event on " + first + " after '" + earlier.name + "' and let " + second +
         " wait for it (stream.wait_stream, stream.wait_event, bpsim_stream_wait_event), or let the host wait in "
         "between";
}

Clock Races::known_after(const Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Clock& clock = clock_of(number_of(stream));
  clock.merge(host_);
  return clock;
}

void Races::host_waited(const Clock& known) {
  std::lock_guard<std::mutex> lock(mutex_);
  host_.merge(known);
  guard_.land(host_);
}

void Races::stream_waited(const Stream& stream, const Clock& known) {
  std::lock_guard<std::mutex> lock(mutex_);
  clock_of(number_of(stream)).merge(known);
}

void Races::freed(uintptr_t first, uint64_t bytes, const std::vector<const Stream*>& streams) {
  std::vector<uint32_t> numbers;
  for (const Stream* stream : streams) numbers.push_back(number_of(*stream));
  std::lock_guard<std::mutex> lock(mutex_);
  Clock known;
  for (const uint32_t number : numbers) known.merge(clock_of(number));
  history_.free(first, bytes, numbers, known);
}

void Races::forget(uintptr_t first, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  history_.forget(first, bytes);
}

HostWait::HostWait(Driver& driver, const Stream& stream) : races_(driver.races), on_(driver.races.on()) {
  if (on_) known_ = races_.known_after(stream);
}

void HostWait::over() const {
  if (on_) races_.host_waited(known_);
}

}  // namespace backplane::sim::driver
