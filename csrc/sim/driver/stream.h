// Defines a stream: a queue, and a thread that runs its entries in order.
//
// The queue is a ring. Submitting writes an entry and one counter; the worker polls for it a short while before it
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
  // Reuses a destroyed stream as a new one: its handle changes.
  void reopen();
  void close() { open_.store(false); }

  // Queues an entry; `sequence` (optional) is the number to pass to finished(). An entry that is not accepted stays
  // with the caller.
  bpsim_status submit(Work&& work, uint64_t* sequence = nullptr);
  uint64_t submitted() const { return head_.load(std::memory_order_seq_cst); }
  bool finished(uint64_t sequence) const { return done_.load(std::memory_order_seq_cst) >= sequence; }
  bool idle() const { return finished(submitted()); }
  // For callers on the host: waits with the watchdog. The status covers the wait, not the outcome of the work.
  bpsim_status wait(uint64_t sequence);
  // Wakes all waiters, so that they check again what may have changed.
  void wake_all();

  // The capture in progress, or null. Changed and used for recording under submitting().
  std::mutex& submitting() { return submitting_; }
  std::shared_ptr<Graph> capture;
  std::atomic<bool> capturing{false};

  double modelled_ns() const { return modelled_clock_.load(std::memory_order_relaxed); }
  double modelled_busy_ns() const { return modelled_busy_.load(std::memory_order_relaxed); }

  // On the worker, for the launch that runs: implements bpsim_launch_detail.
  bool is_watched() const { return watched_; }
  void set_detail(double bytes, double flops, const bpsim_range* output);

  // For the signal handler, which may run on the worker.
  bool is_worker(pid_t thread) const { return worker_id_.load() == thread; }
  const char* running() const { return running_.load(std::memory_order_relaxed); }

  // Requests that the worker end after what it runs now.
  void request_stop();
  // Returns false if it has not ended by the deadline. Destroys what is left in the queue.
  bool join(int64_t deadline_ns);

 private:
  bpsim_status start_worker();
  static void* worker_main(void* self);
  void work();
  bool next_is_there();

  // Implemented in execution.cpp; run on the worker.
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
  // Grows whenever this stream makes progress, or its card's hangs are released.
  uint64_t progress() const;
  const Stream& held_up_by() const;
  bool known_to_hang() const;
  std::string stuck_text(int depth = 0) const;

  Card& card_;
  Driver& driver_;
  const int32_t index_;
  std::atomic<bpsim_stream> handle_;
  std::atomic<bool> open_{true};

  // What the two sides write is on separate cache lines.
  alignas(64) std::mutex submitting_;
  std::unique_ptr<Work[]> ring_;
  std::atomic<uint64_t> head_{0};  // submitted

  alignas(64) std::atomic<uint64_t> done_{0};  // finished
  // What the worker is running, for the watchdog and for messages.
  std::atomic<const char*> running_{nullptr};
  std::atomic<uint64_t> running_number_{0};
  std::atomic<uint64_t> ticks_{0};  // tasks run: progress within a graph
  std::atomic<Stream*> awaiting_{nullptr};
  std::atomic<double> modelled_clock_{0}, modelled_busy_{0};
  // State of the task that runs; used by the worker only.
  bool watched_ = false;
  double bytes_ = 0, flops_ = 0;
  bpsim_range output_{};

  alignas(64) Monitor monitor_;  // where the worker sleeps and callers wait
  std::atomic<bool> sleeping_{false};
  std::atomic<uint64_t> wanted_{UINT64_MAX};   // the least sequence that a sleeping caller waits for
  // The progress at which the watchdog timed out, for a waiter of this stream or of one that it holds up.
  mutable std::atomic<uint64_t> hung_at_{UINT64_MAX};
  std::atomic<bool> stop_{false};
  bool started_ = false;  // under submitting_
  bool ended_ = false;    // under monitor_
  pthread_t thread_{};
  std::atomic<pid_t> worker_id_{0};
};

// Returns the stream whose worker the calling thread is, or null.
Stream* current_worker();

}  // namespace backplane::sim::driver
