// Defines an event: a place in a stream's work, given by a stream and a sequence number.
//
// An event takes an entry of the queue only if its time is needed.
#pragma once

#include <memory>
#include <mutex>

#include "clock.h"
#include "work.h"

namespace backplane::sim::driver {

class Driver;
class Graph;
class Stream;

class Event {
 public:
  explicit Event(bool timed) : timing(timed) {}
  const bool timing;

  // The state of its last record.
  struct Record {
    Stream* stream = nullptr;  // null: never recorded
    uint64_t sequence = 0;
    std::shared_ptr<Mark> mark;
    std::shared_ptr<const Clock> known;  // the clock that a waiter takes over, if races are checked
    bool captured = false;
    std::weak_ptr<Graph> capture;
  };
  Record record();
  void set(Record record);

 private:
  std::mutex mutex_;
  Record record_;
};

bpsim_status record_event(Driver& driver, Event& event, Stream& stream);
bpsim_status query_event(Event& event);
bpsim_status synchronize_event(Event& event);
bpsim_status wait_for_event(Driver& driver, Stream& stream, Event& event);
bpsim_status elapsed(Driver& driver, Event& start, Event& end, double* nanoseconds);

}  // namespace backplane::sim::driver
