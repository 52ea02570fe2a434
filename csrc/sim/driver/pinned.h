// Tracks pinned host memory, so that copies can distinguish it from pageable memory, and keeps it as long as a copy in
// flight or a graph uses it.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "driver.h"

namespace backplane::sim::driver {

class Races;

class Pinned {
 public:
  explicit Pinned(Races& races) : races_(races) {}
  bpsim_status allocate(uint64_t bytes, void** pointer);
  bpsim_status release(void* pointer);

  struct Found {
    std::shared_ptr<const void> keep;  // null if it is not pinned
    uintptr_t start = 0;
    uint64_t bytes = 0;
    explicit operator bool() const { return keep != nullptr; }
  };
  // Returns the memory that contains an address; `freed` means that the user has freed it and something still uses it.
  Found find(uintptr_t address, bool* freed);

 private:
  struct Entry {
    std::shared_ptr<void> hold;  // null once freed
    std::weak_ptr<void> memory;
    uint64_t bytes = 0;
  };
  Races& races_;
  std::mutex mutex_;
  std::map<uintptr_t, Entry> entries_;
};

}  // namespace backplane::sim::driver
