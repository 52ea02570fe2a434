// Manages the memory of one card: two address ranges of equal size.
//
// The device view is what the user gets as device pointers. It never has pages or access rights, so the host cannot
// access it by accident. Launches use the kernel view, at a constant distance; it has pages only where a segment is
// committed. Nothing is ever read through the device view, so the two need not share pages, and the kernel view is
// plain anonymous memory: unlike shared memory it gets huge pages without a change to the system, and it is returned to
// the system at once.
//
// There are four times as many addresses as bytes of memory, so that fragmentation of the addresses does not exhaust a
// card before its memory limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "driver.h"

namespace backplane::sim::driver {

constexpr uint64_t kChunk = 2u << 20;  // the unit of segments: one huge page

inline uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Not thread-safe, except const functions: the allocator's lock guards it.
class Arena {
 public:
  static bpsim_status create(int32_t card, uint64_t limit, std::unique_ptr<Arena>* arena);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uintptr_t base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  ptrdiff_t kernel_offset() const { return kernel_offset_; }
  bool contains(uintptr_t address) const { return address - base_ < bytes_; }
  bool contains_kernel(uintptr_t address) const { return address - kernel_base() < bytes_; }
  uintptr_t kernel_base() const { return base_ + static_cast<uintptr_t>(kernel_offset_); }
  void* kernel_pointer(uintptr_t address) const {
    return reinterpret_cast<void*>(address + static_cast<uintptr_t>(kernel_offset_));
  }

  // Takes addresses for a segment (a multiple of kChunk) and commits memory behind them. Returns BPSIM_OUT_OF_MEMORY,
  // without a text, if no hole is large enough.
  bpsim_status take(uint64_t bytes, uintptr_t* address);
  void give_back(uintptr_t address, uint64_t bytes);
  // Commits memory behind addresses that are already taken; decommit() releases the memory and keeps the addresses.
  bpsim_status commit(uintptr_t address, uint64_t bytes);
  void decommit(uintptr_t address, uint64_t bytes);

  uint64_t resident() const;

 private:
  Arena(int32_t card, uintptr_t base, uintptr_t kernel_base, uint64_t bytes);

  const int32_t card_;
  const uintptr_t base_;
  const uint64_t bytes_;
  const ptrdiff_t kernel_offset_;
  std::map<uintptr_t, uint64_t> holes_;  // address -> bytes
};

}  // namespace backplane::sim::driver
