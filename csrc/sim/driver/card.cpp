// Implements a card: its streams, and its failed and lost states.

#include "card.h"

#include "error.h"
#include "graph.h"
#include "process.h"

namespace backplane::sim::driver {

bpsim_status Card::create(Driver& driver, int32_t index, uint64_t memory, std::unique_ptr<Card>* card) {
  std::unique_ptr<Card> made(new Card(driver, index));
  const bpsim_status status = Arena::create(index, memory, &made->arena_);
  if (status != BPSIM_OK) return status;
  made->allocator_ = std::make_unique<Allocator>(*made, *made->arena_, memory);
  made->streams_[0].store(new Stream(*made, 0));
  *card = std::move(made);
  return BPSIM_OK;
}

Card::~Card() {
  for (auto& stream : streams_) delete stream.load();
}

bpsim_status Card::create_stream(Stream** stream) {
  std::lock_guard<std::mutex> lock(stream_mutex_);
  for (int32_t i = 1; i < BPSIM_MAX_STREAMS; ++i) {
    Stream* const old = streams_[i].load();
    if (old && old->is_open()) continue;
    if (old) {
      old->reopen();
      *stream = old;
    } else {
      *stream = new Stream(*this, i);
      streams_[i].store(*stream, std::memory_order_release);
    }
    return BPSIM_OK;
  }
  return fail(BPSIM_INVALID, "card %d already has %d streams, the maximum. Destroy one, or share them",
              index_, BPSIM_MAX_STREAMS);
}

void Card::fail_with(const std::string& text) {
  std::lock_guard<std::mutex> lock(state_mutex_);
  if (failed_.load()) return;
  failure_ = text;
  failed_.store(true, std::memory_order_release);
}

void Card::fail_now(const std::string& text) {
  fail_with(text);
  reported_.store(true);
}

void Card::lose(const char* why) {
  {
    std::lock_guard<std::mutex> lock(state_mutex_);
    if (lost_.load()) return;
    loss_ = why;
    lost_.store(true, std::memory_order_release);
  }
  wake_all_streams();
}

// Wakes the streams of all cards, because a stream of another card may be waiting for this one.
void Card::wake_all_streams() {
  for (const auto& card : driver_.cards) card->each_stream([](Stream& stream) { stream.wake_all(); });
}

bpsim_status Card::lost_status() const {
  std::lock_guard<std::mutex> lock(state_mutex_);
  return fail(BPSIM_LOST, "card %d is lost (%s). It cannot be recovered in this process: restart the process", index_,
              loss_.c_str());
}

bpsim_status Card::submit_status() const {
  if (is_lost()) return lost_status();
  if (!failed_.load(std::memory_order_acquire) || !reported_.load()) return BPSIM_OK;
  std::lock_guard<std::mutex> lock(state_mutex_);
  return fail(BPSIM_LAUNCH_FAILED, "%s. The card runs nothing until it is reset (bpsim_card_reset)", failure_.c_str());
}

bpsim_status Card::synchronized_status() {
  if (failed_.load(std::memory_order_acquire)) reported_.store(true);
  return submit_status();
}

bpsim_status Card::reset() {
  bpsim_status status = may_synchronize("bpsim_card_reset", nullptr);
  if (status == BPSIM_OK) status = synchronize();
  if (status != BPSIM_OK && status != BPSIM_LAUNCH_FAILED) return status;
  std::lock_guard<std::mutex> lock(state_mutex_);
  failed_.store(false);
  reported_.store(false);
  failure_.clear();
  return BPSIM_OK;
}

bool Card::drain() {
  if (current_worker() || captures.load() != 0) return false;
  bool drained = true;
  each_stream([&](Stream& stream) { drained = drained && stream.wait(stream.submitted()) == BPSIM_OK; });
  return drained;
}

bpsim_status Card::synchronize() {
  bpsim_status status = BPSIM_OK;
  each_stream([&](Stream& stream) {
    const HostWait wait(driver_, stream);
    if (status == BPSIM_OK && !stream.idle()) status = stream.wait(stream.submitted());
    if (status == BPSIM_OK) wait.over();
  });
  return status == BPSIM_OK ? synchronized_status() : status;
}

bpsim_status Card::may_synchronize(const char* call, Stream* stream) {
  if (Stream* const worker = current_worker())
    return fail(BPSIM_INVALID, "%s was called inside a launch ('%s'): it would wait for itself. Call it on the host",
                call, worker->running() ? worker->running() : "?");
  if (captures.load(std::memory_order_acquire) == 0) return BPSIM_OK;
  bpsim_status status = BPSIM_OK;
  each_stream([&](Stream& each) {
    if (!each.capturing.load()) return;
    std::lock_guard<std::mutex> lock(each.submitting());
    if (!each.capture) return;
    if (stream && stream != &each && each.capture->thread != std::this_thread::get_id()) return;
    status = each.capture->spoil(
        "%s was called while stream %d of card %d is capturing: nothing runs, so there is nothing to wait for. End the "
        "capture first",
        call, each.index(), index_);
  });
  return status;
}

}  // namespace backplane::sim::driver
