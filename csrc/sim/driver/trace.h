// Records what ran on a card and when, while a trace is requested.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "driver.h"

namespace backplane::sim::driver {

class Trace {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void start(uint64_t capacity);
  void add(const bpsim_trace_entry& entry);
  void read(bpsim_trace_entry* entries, uint64_t capacity, uint64_t* count, uint64_t* missed);

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<bpsim_trace_entry> entries_;
  uint64_t capacity_ = 0, missed_ = 0;
};

}  // namespace backplane::sim::driver
