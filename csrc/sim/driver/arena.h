// The memory of one card: two ranges of addresses of equal size.
//
// The device view is what the user gets as device pointers. It has no pages and no access, ever: the host cannot touch
// it by accident. The kernel view, at a constant distance, is where launches work; pages are behind it only where a
// segment is committed. As nothing is ever read through the device view, the two need not share pages, and the kernel
// view is plain anonymous memory: unlike a shared memory file it gets huge pages without a change to the system, and
// it goes back to the system at once.
//
// There are four times as many addresses as bytes of memory, so that a hole between segments does not make a card run
// out of memory before its limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "driver.h"

namespace backplane::sim::driver {

constexpr uint64_t kChunk = 2u << 20;  // the unit of segments: one huge page

inline uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Not safe for threads, but for what is const: the allocator's lock guards it.
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

  // Addresses for a segment (a multiple of kChunk) and memory behind them. BPSIM_OUT_OF_MEMORY, without a text, where
  // no hole is large enough.
  bpsim_status take(uint64_t bytes, uintptr_t* address);
  void give_back(uintptr_t address, uint64_t bytes);
  // Memory behind addresses that stay taken.
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
