// Divides the work of linear layers by the sizes of registers and caches, and stores their results.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "isa.h"

namespace backplane::cpu {

// Returns a share of a cache; the rest is for data that streams through it.
inline int64_t cache_bytes(int name, int64_t at_least, int64_t eighths) {
  const long size = sysconf(name);  // 0 or negative if unknown
  return std::max(at_least, int64_t(size)) * eighths / 8;
}
inline int64_t chunk_bytes() {
  static const int64_t bytes = cache_bytes(_SC_LEVEL1_DCACHE_SIZE, 32 << 10, 6);
  return bytes;
}
inline int64_t input_bytes() {
  static const int64_t bytes = cache_bytes(_SC_LEVEL2_CACHE_SIZE, 1 << 20, 5);
  return bytes;
}

struct alignas(64) Line {  // a vector that crosses a cache line costs two loads
  float floats[16];
};

// Divides a length into parts of nearly equal size: fifteen rows into eight and seven rather than fourteen and one. All
// parts but the last end at a multiple of `multiple`, if instructions require that.
struct Parts {
  int64_t length, multiple, units, count;

  Parts(int64_t length, int64_t most, int64_t multiple = 1)
      : length(length),
        multiple(multiple),
        units((length + multiple - 1) / multiple),
        count((units + most / multiple - 1) / (most / multiple)) {}
  int64_t begin(int64_t part) const { return std::min(part * units / count * multiple, length); }
  int64_t size(int64_t part) const { return begin(part + 1) - begin(part); }
};

// Writes a row of the tile, plus its bias, in the type of the result; `count` may end inside the last vector.
template <class T>
struct Finish {
  template <int W>
  static BACKPLANE_INLINE void run(const float* tile, const float* bias, T* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) {
      const Floats<W> sums = load<W>(tile + i);
      write<W>(to + i, bias ? sums + load<W>(bias + i) : sums);
    }
    if (i < count) {
      const Floats<W> sums = load<W>(tile + i);
      write_some<W>(to + i, bias ? sums + read_some<W>(bias + i, count - i) : sums, count - i);
    }
  }
};

}  // namespace backplane::cpu
