// A stream: a queue, and a thread that runs what is in it, in order.
//
// The queue is a ring. Submitting writes an entry and one counter; the worker looks for it a short while before it
// sleeps, so a steady flow of launches costs no system call. Progress is one number: how many entries are finished.
// Events, allocations and waiting callers all compare against it.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "waiting.h"
#include "work.h"

namespace backplane::sim::driver {

class Card;
class Driver;

class Stream {
 public:
  static constexpr uint64_t kQueue = 1024;
  static constexpr int kLongestRow = BPSIM_MAX_CARDS * BPSIM_MAX_STREAMS;  // of streams that wait for each other

  Stream(Card& card, int32_t index);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Card& card() const { return card_; }
  int32_t index() const { return index_; }
  bpsim_stream handle() const { return handle_.load(std::memory_order_acquire); }
  bool is_open() const { return open_.load(std::memory_order_acquire); }
  // A new stream in the place of a destroyed one: its handle changes.
  void reopen();
  void close() { open_.store(false); }

  // Queues it; `sequence` (optional) is what finished() will ask for. What is not accepted stays with the caller.
  bpsim_status submit(Work&& work, uint64_t* sequence = nullptr);
  uint64_t submitted() const { return head_.load(std::memory_order_seq_cst); }
  bool finished(uint64_t sequence) const { return done_.load(std::memory_order_seq_cst) >= sequence; }
  bool idle() const { return finished(submitted()); }
  // For callers on the host: with the watchdog; says only whether the wait ended well, not how the work did.
  bpsim_status wait(uint64_t sequence);
  // Wakes everybody who waits here, to look again at what may have changed.
  void wake_all();

  // The capture in progress, or null. Changed and used for recording under submitting().
  std::mutex& submitting() { return submitting_; }
  std::shared_ptr<Graph> capture;
  std::atomic<bool> capturing{false};

  double modelled_ns() const { return modelled_clock_.load(std::memory_order_relaxed); }
  double modelled_busy_ns() const { return modelled_busy_.load(std::memory_order_relaxed); }

  // On the worker, of the launch that runs: what bpsim_launch_detail says.
  bool is_watched() const { return watched_; }
  void tell_detail(double bytes, double flops, const bpsim_range* output);

  // For the handler of stray accesses, which may run on the worker.
  bool is_worker(pid_t thread) const { return worker_id_.load() == thread; }
  const char* running() const { return running_.load(std::memory_order_relaxed); }

  // Asks the worker to end after what it runs now.
  void ask_to_stop();
  // False where it has not ended by then. What is left in the queue is destroyed.
  bool join(int64_t deadline_ns);

 private:
  bpsim_status start_worker();
  static void* worker_main(void* self);
  void work();
  bool next_is_there();

  // execution.cpp: on the worker
  void execute(Work& work);
  void run(Task& task, uint64_t number, const Strike* strikes, size_t count);
  void run_graph(Work& work);
  bool call(Task& task, uint64_t number);
  void corrupt(const Task& task, uint64_t number, const Strike& strike);
  void check_arrival(const Task& task, uint64_t number, uint64_t sent);
  void hang(uint64_t releases);
  void await(const Work& work);
  void account(double nanoseconds);
  std::string named(const Task& task, uint64_t number) const;

  bool interrupted() const;
  // Grows whenever this stream gets on, or its card's hangs are released.
  uint64_t progress() const;
  const Stream& held_up_by() const;
  bool known_to_hang() const;
  std::string stuck_text(int depth = 0) const;

  Card& card_;
  Driver& driver_;
  const int32_t index_;
  std::atomic<bpsim_stream> handle_;
  std::atomic<bool> open_{true};

  // What the two sides write is kept on lines of its own.
  alignas(64) std::mutex submitting_;
  std::unique_ptr<Work[]> ring_;
  std::atomic<uint64_t> head_{0};  // submitted

  alignas(64) std::atomic<uint64_t> done_{0};  // finished
  // What the worker is at, for the watchdog and for messages.
  std::atomic<const char*> running_{nullptr};
  std::atomic<uint64_t> running_number_{0};
  std::atomic<uint64_t> ticks_{0};  // tasks run: progress within a graph
  std::atomic<Stream*> awaiting_{nullptr};
  std::atomic<double> modelled_clock_{0}, modelled_busy_{0};
  // Of the task that runs; the worker's own.
  bool watched_ = false;
  double bytes_ = 0, flops_ = 0;
  bpsim_range output_{};

  alignas(64) Monitor monitor_;  // where the worker sleeps and callers wait
  std::atomic<bool> sleeping_{false};
  std::atomic<uint64_t> wanted_{UINT64_MAX};   // the least sequence that a sleeping caller waits for
  // The progress at which the watchdog has barked; by whoever waits for this stream, or for one that it holds up.
  mutable std::atomic<uint64_t> hung_at_{UINT64_MAX};
  std::atomic<bool> stop_{false};
  bool started_ = false;  // under submitting_
  bool ended_ = false;    // under monitor_
  pthread_t thread_{};
  std::atomic<pid_t> worker_id_{0};
};

// The stream whose worker the calling thread is, or null.
Stream* current_worker();

}  // namespace backplane::sim::driver
