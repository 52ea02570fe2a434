// Detects missing synchronization: work that accesses the same memory without an order between the accesses.
//
// Every stream has a vector clock of the work of other streams that precedes its next submission, and so has the host.
// Events, waits and submissions propagate the clocks. AccessHistory holds the accesses that they are compared with, and
// PinnedGuard watches the memory that host and copies share. All host threads share one clock: what one of them has
// waited for, all have.
#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "access_history.h"
#include "clock.h"
#include "driver.h"
#include "pinned_guard.h"

namespace backplane::sim::driver {

class Driver;
class Graph;
class Stream;
struct Task;

class Races {
 public:
  explicit Races(Driver& driver) : driver_(driver) {}

  bool on() const { return mode_.load(std::memory_order_relaxed) != BPSIM_RACES_OFF; }
  bool fails() const { return mode_.load(std::memory_order_relaxed) == BPSIM_RACES_FAIL; }
  // Sets the mode from now on; work submitted earlier is not checked.
  void set(bpsim_races mode);
  uint64_t found() const { return found_.load(); }
  PinnedGuard& guard() { return guard_; }

  // Checks a task or a graph at its submission. Returns BPSIM_RACE if a race is to fail; the work then counts as not
  // submitted.
  bpsim_status submit(Stream& stream, const Task& task, const bpsim_range* ranges, size_t count);
  bpsim_status submit(Stream& stream, const Graph& graph);

  // Returns the clock that a waiter for everything submitted to the stream so far takes over.
  Clock known_after(const Stream& stream);
  void host_waited(const Clock& known);
  void stream_waited(const Stream& stream, const Clock& known);

  // freed() records that memory was freed which these streams were known to use; forget() drops the history of memory.
  void freed(uintptr_t first, uint64_t bytes, const std::vector<const Stream*>& streams);
  void forget(uintptr_t first, uint64_t bytes);

  // Called in the signal handler.
  void count_host_access() { found_.fetch_add(1); }

 private:
  struct Found {
    Conflict conflict;
    Access access;
    bool writes = false;
  };
  struct Touch {
    uintptr_t first;
    uint64_t bytes;
    bool writes;
    const char* name;
  };
  bpsim_status submit(Stream& stream, const std::vector<Touch>& touches, const std::vector<PinnedGuard::Flight>& flights);
  Clock& clock_of(uint32_t stream);
  std::string text(const Found& found) const;
  static void gather(const Task& task, const bpsim_range* ranges, size_t count, std::vector<Touch>* touches,
                     std::vector<PinnedGuard::Flight>* flights);

  Driver& driver_;
  std::atomic<bpsim_races> mode_{BPSIM_RACES_OFF};
  std::atomic<uint64_t> found_{0};
  PinnedGuard guard_;
  std::mutex mutex_;
  AccessHistory history_;
  std::vector<Clock> clocks_;  // of streams
  Clock host_;
  std::set<std::pair<std::string, std::string>> reported_;
};

// Records a wait of the host for everything submitted to a stream so far.
class HostWait {
 public:
  HostWait(Driver& driver, const Stream& stream);
  // Call it when the wait has ended.
  void over() const;

 private:
  Races& races_;
  const bool on_;
  Clock known_;
};

}  // namespace backplane::sim::driver
