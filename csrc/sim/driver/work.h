// What a stream's queue holds.
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

// The user's function and what it needs, which is destroyed exactly once.
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

// Of a copy whose caller waits because its memory is its own: a caller that gives up waiting takes the copy back.
struct Ticket {
  std::mutex mutex;  // held while the copy runs
  bool cancelled = false;
};

// One thing that a card does: a launch, a copy or a fill. Also what a graph is made of.
struct Task {
  enum class Kind : uint8_t { Launch, Copy, Fill };

  Kind kind = Kind::Launch;
  bool crosses_link = false;  // a copy to or from the host or another card
  uint8_t value = 0;          // of a fill
  const char* name = "";
  double bytes = 0, flops = 0;
  Closure closure;
  // Of copies and fills: kernel pointers, or host memory.
  void* to = nullptr;
  const void* from = nullptr;
  uint64_t size = 0;
  // Of launches, with device pointers: only kept where something will ask for them (a graph, a fault).
  std::vector<bpsim_range> ranges;
  bpsim_range host{};                // the pinned side of a copy, as the user names it
  std::unique_ptr<char[]> staged;    // a pageable source, copied when the copy was submitted
  std::shared_ptr<const void> keep;  // pinned memory that must stay until then
  std::shared_ptr<Ticket> ticket;

  bool counts_as_launch() const { return kind == Kind::Launch; }
};

// A fault that strikes one task.
struct Strike {
  uint64_t node = 0;  // of a graph
  bpsim_fault_kind kind = BPSIM_FAULT_FAIL;
  bpsim_corruption corruption = BPSIM_CORRUPT_NAN;
  uint32_t elements = 1;
  uint64_t releases = 0;  // of the card when it was submitted: a hang ends with the next one
};

// The moment at which a stream passed an event.
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
  std::vector<Strike> strikes;      // of the task, or of nodes in their order
  std::shared_ptr<Mark> mark;       // Record: to set; Wait: of the event, if it has one
  Stream* awaited = nullptr;        // Wait
  uint64_t sequence = 0;            // Wait: until it has finished this
};

}  // namespace backplane::sim::driver
