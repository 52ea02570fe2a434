// Implements the trace of a card.

#include "trace.h"

#include <algorithm>

namespace backplane::sim::driver {

void Trace::start(uint64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<bpsim_trace_entry>().swap(entries_);
  entries_.reserve(capacity);
  capacity_ = capacity;
  missed_ = 0;
  on_.store(capacity != 0);
}

void Trace::add(const bpsim_trace_entry& entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (capacity_ == 0) return;
  if (entries_.size() < capacity_)
    entries_.push_back(entry);
  else
    ++missed_;
}

void Trace::read(bpsim_trace_entry* entries, uint64_t capacity, uint64_t* count, uint64_t* missed) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t fit = std::min<size_t>(capacity, entries_.size());
  std::copy_n(entries_.begin(), fit, entries);
  *count = entries_.size();
  *missed = missed_;
}

}  // namespace backplane::sim::driver
