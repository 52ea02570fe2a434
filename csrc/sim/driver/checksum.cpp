// Implements the checksums of copies.

#include "checksum.h"

#include <cstring>

namespace backplane::sim::driver {
namespace {

constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
constexpr uint64_t kLanes = 4;  // independent multiplications

// Reversible for a given word, so that different states stay different.
uint64_t mixed(uint64_t state, uint64_t word) {
  state = (state ^ word) * kOdd;
  return state ^ (state >> 29);
}

// `read(i)` returns the i-th word; `rest` holds the bytes after the last whole word.
template <class Read>
uint64_t summed(uint64_t bytes, uint64_t rest, Read&& read) {
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  const uint64_t words = bytes / 8;
  uint64_t i = 0;
  for (; i + kLanes <= words; i += kLanes)
    for (uint64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = mixed(lanes[lane], read(i + lane));
  for (; i < words; ++i) lanes[0] = mixed(lanes[0], read(i));
  uint64_t sum = mixed(bytes, rest);
  for (const uint64_t lane : lanes) sum = mixed(sum, lane);
  return sum;
}

}  // namespace

uint64_t checksum(const void* data, uint64_t bytes) {
  const auto* const from = static_cast<const unsigned char*>(data);
  uint64_t rest = 0;
  std::memcpy(&rest, from + bytes / 8 * 8, bytes % 8);
  return summed(bytes, rest, [from](uint64_t i) {
    uint64_t word;
    std::memcpy(&word, from + i * 8, 8);
    return word;
  });
}

uint64_t checksum_of_source(const Task& task) {
  if (task.kind == Task::Kind::Copy) return checksum(task.from, task.size);
  uint64_t word, rest = 0;
  std::memset(&word, task.value, sizeof word);
  std::memset(&rest, task.value, task.size % 8);
  return summed(task.size, rest, [word](uint64_t) { return word; });
}

}  // namespace backplane::sim::driver
