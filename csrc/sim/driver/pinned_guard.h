// Protects pinned host memory from the host while copies use it: no access while a copy may still write it, no writes
// while a copy may still read it.
//
// "May still" lasts until the host has waited for the copy, not until the copy happens to be done. Such memory is
// mapped twice. Copies use the second mapping; the pages of the first, which is the user's, are protected. An access to
// them reaches the signal handler for stray accesses, which calls `touched`.
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

  // Allocates memory that is mapped twice, and returns the user's mapping; both are unmapped when the last reference is
  // gone. Returns null if the system refuses.
  std::shared_ptr<void> map(uint64_t bytes);
  // Returns the address in the mapping for copies, or the same address for other memory.
  uintptr_t for_copies(uintptr_t address);

  // A submitted copy, and the range of host memory that it accesses.
  struct Flight {
    uintptr_t first = 0, last = 0;
    bool written = false;  // by the copy
    uint32_t stream = 0;
    uint64_t position = 0;
    const char* name = "";
  };
  void add(const Flight& flight);
  // Removes the copies that the host has waited for.
  void land(const Clock& known);
  void forget_all();

  // For the signal handler: returns whether the address is in guarded memory. If so, its page is open from now on, and
  // `flight` is the copy that may still use the byte; its position is 0 if only other bytes of the page are in use.
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
  // Also locked in the signal handler: a thread that holds it must not access the guarded memory.
  std::mutex mutex_;
  std::vector<Mapping> mappings_;
  std::vector<Flight> flights_;
  std::vector<uintptr_t> readable_;  // closed pages that a fault has opened for reading
};

}  // namespace backplane::sim::driver
