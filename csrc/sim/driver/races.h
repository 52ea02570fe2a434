// Missing synchronisation: finds work that touches the same memory in an order that nobody has made.
//
// Every stream has a clock that says which work of other streams comes before what is submitted to it next, and so has
// the host. Events, waiting and submitting pass that knowledge on; AccessHistory holds what it is compared with, and
// PinnedGuard watches the one memory that host and copies share. The host is taken for one: what one of its threads
// has waited for, all have.
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
  // From here on; what was submitted before is not known.
  void set(bpsim_races mode);
  uint64_t found() const { return found_.load(); }
  PinnedGuard& guard() { return guard_; }

  // A task or a graph is submitted: BPSIM_RACE where a race is to fail it, and then it counts as not submitted.
  bpsim_status submit(Stream& stream, const Task& task, const bpsim_range* ranges, size_t count);
  bpsim_status submit(Stream& stream, const Graph& graph);

  // What whoever waits for all that was submitted to the stream by now will know.
  Clock known_after(const Stream& stream);
  void host_learns(const Clock& known);
  void stream_learns(const Stream& stream, const Clock& known);

  // Memory of a card is freed, which these streams were known to use; or is nobody's at all any more.
  void freed(uintptr_t first, uint64_t bytes, const std::vector<const Stream*>& streams);
  void forget(uintptr_t first, uint64_t bytes);

  // In the handler of a fault.
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
  std::set<std::pair<std::string, std::string>> told_;
};

// The host waits for all that was submitted to a stream by now.
class HostWait {
 public:
  HostWait(Driver& driver, const Stream& stream);
  // The wait has ended.
  void over() const;

 private:
  Races& races_;
  const bool on_;
  Clock known_;
};

}  // namespace backplane::sim::driver
