// Records the last accesses to memory: for every byte its last write, and the reads since, one per stream.
//
// Two accesses to the same byte, of which one writes, must be ordered: by one stream, by an event, or by a wait on the
// host. A vector clock decides that when the second access is submitted. So a race is found even if the first access
// had long finished this time.
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

// Two accesses without an order between them.
struct Conflict {
  Access earlier;
  bool earlier_writes = false;
  uintptr_t first = 0, last = 0;  // [first, last)
  explicit operator bool() const { return earlier.position != 0; }
};

class AccessHistory {
 public:
  // Returns an access that one with the clock `known` is not ordered after; changes nothing.
  Conflict conflict(uintptr_t first, uint64_t bytes, bool writes, uint32_t stream, const Clock& known) const;
  void add(uintptr_t first, uint64_t bytes, bool writes, const Access& access);
  // Records that memory was freed. By the allocator's rules its next user comes after the work of these streams, and
  // after everything that their clocks include.
  void free(uintptr_t first, uint64_t bytes, const std::vector<uint32_t>& streams, const Clock& known);
  void forget(uintptr_t first, uint64_t bytes);
  void clear() { pieces_.clear(); }

 private:
  struct Piece {
    uintptr_t end = 0;
    Access write;
    std::vector<Access> reads;
  };
  using Pieces = std::map<uintptr_t, Piece>;  // keyed by start; they do not overlap

  void cut(uintptr_t at);
  Pieces::const_iterator first_after(uintptr_t address) const;
  static void add_read(Piece& piece, const Access& access);

  Pieces pieces_;
};

}  // namespace backplane::sim::driver
