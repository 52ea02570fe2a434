// Defines the entries of a stream's queue.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"

namespace backplane::sim::driver {

class Graph;
class Stream;

// The user's function and its argument, which is destroyed exactly once.
class Closure {
 public:
  Closure() = default;
  explicit Closure(const bpsim_launch& launch)
      : function_(launch.function), arg_(launch.arg), destroy_(launch.destroy) {}
  Closure(Closure&& other) noexcept
      : function_(other.function_), arg_(other.arg_), destroy_(std::exchange(other.destroy_, nullptr)) {}
  Closure& operator=(Closure&& other) noexcept {
    std::swap(function_, other.function_);
    std::swap(arg_, other.arg_);
    std::swap(destroy_, other.destroy_);
    return *this;
  }
  ~Closure() {
    if (destroy_) destroy_(arg_);
  }

  int operator()(char* error, size_t bytes) const { return function_(arg_, error, bytes); }

 private:
  bpsim_function function_ = nullptr;
  void* arg_ = nullptr;
  bpsim_destructor destroy_ = nullptr;
};

// Belongs to a copy whose caller waits because it owns the memory: a caller that times out cancels the copy.
struct Ticket {
  std::mutex mutex;  // held while the copy runs
  bool cancelled = false;
};

// One operation of a card: a launch, a copy or a fill. Graphs consist of tasks too.
struct Task {
  enum class Kind : uint8_t { Launch, Copy, Fill };

  Kind kind = Kind::Launch;
  bool crosses_link = false;  // a copy to or from the host or another card
  uint8_t value = 0;          // of a fill
  const char* name = "";
  double bytes = 0, flops = 0;
  Closure closure;
  // For copies and fills: kernel addresses, or host memory.
  void* to = nullptr;
  const void* from = nullptr;
  uint64_t size = 0;
  // For launches, with device pointers: only kept if something needs them (a graph, a fault).
  std::vector<bpsim_range> ranges;
  bpsim_range host{};                // the pinned side of a copy, at the user's address
  std::unique_ptr<char[]> staged;    // a copy of a pageable source, made at submission
  std::shared_ptr<const void> keep;  // keeps pinned memory alive until the copy is done
  std::shared_ptr<Ticket> ticket;

  bool counts_as_launch() const { return kind == Kind::Launch; }
};

// An injected fault that applies to one task.
struct Strike {
  uint64_t node = 0;  // of a graph
  bpsim_fault_kind kind = BPSIM_FAULT_FAIL;
  bpsim_corruption corruption = BPSIM_CORRUPT_NAN;
  uint32_t elements = 1;
  uint64_t releases = 0;  // the card's counter at submission: a hang ends when it changes
};

// The time at which a stream passed an event.
struct Mark {
  std::atomic<bool> passed{false};
  std::atomic<int64_t> real_ns{0};
  std::atomic<double> modelled_ns{0};
};

// An entry of the queue.
struct Work {
  enum class Kind : uint8_t { Run, Replay, Record, Wait };

  Kind kind = Kind::Run;
  Task task;                        // Run
  std::shared_ptr<Graph> graph;     // Replay
  uint64_t launch = 0, copy = 0;    // number of the (first) launch and copy on the card
  std::vector<Strike> strikes;      // of the task, or of the graph's nodes in order
  std::shared_ptr<Mark> mark;       // Record: to set; Wait: of the event, if it has one
  Stream* awaited = nullptr;        // Wait
  uint64_t sequence = 0;            // Wait: until the stream has finished this
};

}  // namespace backplane::sim::driver
