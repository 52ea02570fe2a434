// Implements a stream: its queue, its worker thread, and waiting with a watchdog.

#include "stream.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "card.h"
#include "error.h"
#include "graph.h"
#include "process.h"

namespace backplane::sim::driver {
namespace {

thread_local Stream* this_worker = nullptr;

// Combines card, generation and index; never 0, and positive as int64_t.
bpsim_stream make_handle(int32_t card, uint32_t generation, int32_t index) {
  return (static_cast<uint64_t>(card + 1) << 32) | (static_cast<uint64_t>(generation & 0xffffffu) << 8) |
         static_cast<uint64_t>(index);
}

}  // namespace

Stream* current_worker() { return this_worker; }

Stream::Stream(Card& card, int32_t index)
    : card_(card), driver_(card.driver()), index_(index), handle_(make_handle(card.index(), 0, index)) {}

Stream::~Stream() = default;

void Stream::reopen() {
  const uint32_t generation = static_cast<uint32_t>(handle() >> 8) & 0xffffffu;
  handle_.store(make_handle(card_.index(), generation + 1, index_));
  open_.store(true);
}

bpsim_status Stream::submit(Work&& work, uint64_t* sequence) {
  std::lock_guard<std::mutex> lock(submitting_);
  if (!started_) {
    const bpsim_status status = start_worker();
    if (status != BPSIM_OK) return status;
  }
  const uint64_t place = head_.load(std::memory_order_relaxed);
  if (place >= kQueue && !finished(place - kQueue + 1)) {
    const bpsim_status status = wait(place - kQueue + 1);
    if (status != BPSIM_OK) return status;
  }
  ring_[place % kQueue] = std::move(work);
  head_.store(place + 1, std::memory_order_seq_cst);
  if (sequence) *sequence = place + 1;
  // The worker sets sleeping_ before it reads head_ for the last time, so one of the two sees the other.
  if (sleeping_.load(std::memory_order_seq_cst)) wake_all();
  return BPSIM_OK;
}

void Stream::wake_all() {
  std::lock_guard<Monitor> lock(monitor_);
  monitor_.notify_all();
}

bool Stream::interrupted() const {
  return card_.is_lost() || driver_.stopping.load(std::memory_order_acquire);
}

bpsim_status Stream::wait(uint64_t sequence) {
  const auto over = [&] { return finished(sequence) || interrupted(); };
  const int64_t timeout = driver_.sync_timeout_ns.load(std::memory_order_relaxed);
  bool timed_out = timeout > 0 && !over() && known_to_hang();
  if (!timed_out && !driver_.spin.until(over)) {
    std::lock_guard<Monitor> lock(monitor_);
    const Stream* holder = &held_up_by();
    uint64_t seen = holder->progress();
    int64_t since = now_ns();
    for (;;) {
      // Set before done_ is read for the last time, as the worker stores done_ before it reads wanted_.
      if (sequence < wanted_.load()) wanted_.store(sequence, std::memory_order_seq_cst);
      if (over()) break;
      if (timeout <= 0) {
        monitor_.wait();
        continue;
      }
      // Waits in slices, so that the time-out restarts soon after progress was made.
      monitor_.wait_until(now_ns() + std::max<int64_t>(timeout / 8, 100000));
      const Stream* const holder_now = &held_up_by();
      const uint64_t now_at = holder_now->progress();
      if (holder_now != holder || now_at != seen) {
        holder = holder_now;
        seen = now_at;
        since = now_ns();
      } else if (!over() && (now_ns() - since >= timeout || known_to_hang())) {
        timed_out = true;
        holder->hung_at_.store(seen);
        break;
      }
    }
  }
  if (timed_out)
    return fail(BPSIM_TIMEOUT,
                "card %d, stream %d: nothing was finished for %lld ms; it hangs in %s. Release it "
                "(bpsim_release_hangs), restart the process, or raise the time-out if the work is known to take longer",
                card_.index(), index_, static_cast<long long>(timeout / 1000000), stuck_text().c_str());
  if (card_.is_lost()) return card_.lost_status();
  // Checked before success: dropped work finishes quickly too.
  if (!driver_.stopping.load(std::memory_order_acquire)) return BPSIM_OK;
  return fail(BPSIM_NOT_INITIALIZED, "the driver was shut down while this call waited for card %d, stream %d",
              card_.index(), index_);
}

uint64_t Stream::progress() const { return ticks_.load() + done_.load() + card_.releases.load(); }

// Returns the last stream in the chain of streams that wait for each other: without its progress, none of them
// continues. Returns this stream if it waits for no other.
const Stream& Stream::held_up_by() const {
  const Stream* last = this;
  for (int step = 0; step < kLongestRow; ++step) {
    const Stream* const next = last->awaiting_.load();
    if (!next) break;
    last = next;
  }
  return *last;
}

// Returns whether a caller has already timed out on the stream that holds this one up: all streams behind it have
// waited as long.
bool Stream::known_to_hang() const {
  const Stream& holder = held_up_by();
  return holder.hung_at_.load() == holder.progress();
}

std::string Stream::stuck_text(int depth) const {
  const Stream* const other = awaiting_.load();
  char text[160];
  if (other && depth < 8) {
    std::snprintf(text, sizeof text, "a wait for card %d, stream %d, which is in ", other->card_.index(),
                  other->index_);
    return text + other->stuck_text(depth + 1);
  }
  const char* const name = running();
  if (!name) return "an entry without a name";
  std::snprintf(text, sizeof text, "'%s' (number %llu)", name,
                static_cast<unsigned long long>(running_number_.load()));
  return text;
}

bpsim_status Stream::start_worker() {
  ring_.reset(new Work[kQueue]);
  // Signals to the process are for its own threads; those that a thread causes itself cannot be blocked.
  sigset_t all, before;
  sigfillset(&all);
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, signal);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&thread_, nullptr, &Stream::worker_main, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0)
    return fail(BPSIM_SYSTEM, "card %d, stream %d: the system refused to start a thread (%s)", card_.index(), index_,
                std::strerror(error));
  started_ = true;
  return BPSIM_OK;
}

void* Stream::worker_main(void* self) {
  Stream& stream = *static_cast<Stream*>(self);
  this_worker = &stream;
  stream.worker_id_.store(static_cast<pid_t>(syscall(SYS_gettid)));
#if defined(__linux__)
  char name[16];
  std::snprintf(name, sizeof name, "sim-%d-%d", stream.card_.index(), stream.index_);
  pthread_setname_np(pthread_self(), name);
#endif
  if (stream.driver_.config.worker_start)
    stream.driver_.config.worker_start(stream.card_.index(), stream.handle(), stream.driver_.config.worker_start_arg);
  stream.work();
  stream.worker_id_.store(0);
  std::lock_guard<Monitor> lock(stream.monitor_);
  stream.ended_ = true;
  stream.monitor_.notify_all();
  return nullptr;
}

// Waits for an entry; returns false if the stream is to stop.
bool Stream::next_is_there() {
  const uint64_t next = done_.load(std::memory_order_relaxed);
  const auto there = [&] {
    return head_.load(std::memory_order_seq_cst) != next || stop_.load(std::memory_order_relaxed);
  };
  if (!driver_.spin.until(there)) {
    std::lock_guard<Monitor> lock(monitor_);
    sleeping_.store(true, std::memory_order_seq_cst);
    while (!there()) monitor_.wait();
    sleeping_.store(false, std::memory_order_relaxed);
  }
  return !stop_.load();
}

void Stream::work() {
  while (next_is_there()) {
    const uint64_t number = done_.load(std::memory_order_relaxed);
    Work& entry = ring_[number % kQueue];
    execute(entry);
    entry = Work();  // destroyed before it counts as finished, so that a waiter can rely on it
    done_.store(number + 1, std::memory_order_seq_cst);
    // Only if a caller waits for it: waking a caller after each launch of a step would cost more than the launches.
    if (number + 1 < wanted_.load(std::memory_order_seq_cst)) continue;
    std::lock_guard<Monitor> lock(monitor_);
    wanted_.store(UINT64_MAX);
    monitor_.notify_all();
  }
}

void Stream::request_stop() {
  stop_.store(true);
  wake_all();
}

bool Stream::join(int64_t deadline_ns) {
  std::lock_guard<std::mutex> submit_lock(submitting_);
  if (started_) {
    {
      std::lock_guard<Monitor> lock(monitor_);
      while (!ended_)
        if (!monitor_.wait_until(deadline_ns) && now_ns() >= deadline_ns && !ended_) return false;
    }
    pthread_join(thread_, nullptr);
    started_ = false;
  }
  ring_.reset();
  return true;
}

}  // namespace backplane::sim::driver
