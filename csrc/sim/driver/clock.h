// Defines a vector clock: for each stream, the number of its submissions that are known to precede.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace backplane::sim::driver {

class Clock {
 public:
  uint64_t of(uint32_t stream) const { return stream < done_.size() ? done_[stream] : 0; }
  void set(uint32_t stream, uint64_t position) {
    if (stream >= done_.size()) done_.resize(stream + 1);
    done_[stream] = position;
  }
  void merge(const Clock& other) {
    if (done_.size() < other.done_.size()) done_.resize(other.done_.size());
    for (size_t i = 0; i < other.done_.size(); ++i) done_[i] = std::max(done_[i], other.done_[i]);
  }

 private:
  std::vector<uint64_t> done_;
};

}  // namespace backplane::sim::driver
