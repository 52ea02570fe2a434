// Pinned host memory that the host may not touch: while a copy may still write it, at all; while one may still read it,
// not for writing. "May still" means until the host has waited for the copy, not until it happens to be done.
//
// Such memory is mapped twice. The copies use the second mapping; the pages of the first, which is the user's, are
// protected. An access to them arrives at the handler of stray accesses, which asks `touched`.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "clock.h"

namespace backplane::sim::driver {

class PinnedGuard {
 public:
  PinnedGuard();

  // Memory mapped twice: the user's, which unmaps both when the last reference goes; null where the system refuses.
  std::shared_ptr<void> map(uint64_t bytes);
  // The address at which copies see it; itself for other memory.
  uintptr_t for_copies(uintptr_t address);

  // A copy that was submitted touches the range.
  struct Flight {
    uintptr_t first = 0, last = 0;
    bool written = false;  // by the copy
    uint32_t stream = 0;
    uint64_t position = 0;
    const char* name = "";
  };
  void add(const Flight& flight);
  // The host has waited.
  void land(const Clock& known);
  void forget_all();

  // For the handler of a fault: whether the address is in memory that is guarded. If so, its page is open from here on,
  // and `flight` is the copy that may still use the byte; without a position where only others in the page are.
  bool touched(uintptr_t address, Flight* flight);

 private:
  struct Mapping {
    uintptr_t user = 0, copies = 0;
    uint64_t bytes = 0;
  };
  const Mapping* mapping_at(uintptr_t address) const;
  void unmap(uintptr_t user);
  void protect(uintptr_t first, uintptr_t last);
  int allowed_in(uintptr_t page) const;

  const uintptr_t page_;
  // Also taken in the handler: whoever holds it must not touch the memory it guards.
  std::mutex mutex_;
  std::vector<Mapping> mappings_;
  std::vector<Flight> flights_;
  std::vector<uintptr_t> readable_;  // pages that were closed, and opened for reading by a fault
};

}  // namespace backplane::sim::driver
