// Who touched which memory last: for every byte its last write, and the reads since, one per stream.
//
// Two touches of the same byte, of which one writes, must be in an order that somebody has made: by working on one
// stream, by an event, or by waiting on the host. Whether they are is a question to a clock, asked when the second one
// is submitted. So a race is found although, this time, the first had long been done.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "clock.h"

namespace backplane::sim::driver {

struct Access {
  uint32_t stream = 0;
  uint64_t position = 0;  // 0: none
  const char* name = "";  // of the launch or copy
  bool freed = false;     // the memory was freed since, and this stream was not recorded for it
};

// Two accesses that nothing orders.
struct Conflict {
  Access earlier;
  bool earlier_writes = false;
  uintptr_t first = 0, last = 0;  // [first, last)
  explicit operator bool() const { return earlier.position != 0; }
};

class AccessHistory {
 public:
  // What an access that knows `known` is not ordered after; nothing is changed.
  Conflict conflict(uintptr_t first, uint64_t bytes, bool writes, uint32_t stream, const Clock& known) const;
  void add(uintptr_t first, uint64_t bytes, bool writes, const Access& access);
  // Memory that is freed: whoever is given it comes after the work of these streams, by the allocator's own rules, and
  // after what they know to be done.
  void free(uintptr_t first, uint64_t bytes, const std::vector<uint32_t>& streams, const Clock& known);
  void forget(uintptr_t first, uint64_t bytes);
  void clear() { pieces_.clear(); }

 private:
  struct Piece {
    uintptr_t end = 0;
    Access write;
    std::vector<Access> reads;
  };
  using Pieces = std::map<uintptr_t, Piece>;  // by their start; they do not overlap

  void cut(uintptr_t at);
  Pieces::const_iterator first_after(uintptr_t address) const;
  static void add_read(Piece& piece, const Access& access);

  Pieces pieces_;
};

}  // namespace backplane::sim::driver
