// Implements the address ranges and the memory of one card with mmap.

#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "error.h"

namespace backplane::sim::driver {
namespace {

void* reserve(void* at, uint64_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  return mmap(at, bytes, PROT_NONE, flags, -1, 0);
}

// Aligns to kChunk, so that huge pages fit.
uintptr_t reserve_aligned(uint64_t bytes) {
  void* const whole = reserve(nullptr, bytes + kChunk);
  if (whole == MAP_FAILED) return 0;
  const uintptr_t start = reinterpret_cast<uintptr_t>(whole);
  const uintptr_t aligned = round_up(start, kChunk);
  if (aligned > start) munmap(whole, aligned - start);
  munmap(reinterpret_cast<void*>(aligned + bytes), start + kChunk - aligned);
  return aligned;
}

// A child process cannot use the card, and copying the page tables of its memory would slow down every fork.
void exclude_from_fork(void* at, uint64_t bytes) { madvise(at, bytes, MADV_DONTFORK); }

}  // namespace

bpsim_status Arena::create(int32_t card, uint64_t limit, std::unique_ptr<Arena>* arena) {
  const uint64_t bytes = 4 * limit + 64 * kChunk;
  const uintptr_t device = reserve_aligned(bytes);
  const uintptr_t kernel = device ? reserve_aligned(bytes) : 0;
  if (!kernel) {
    const int error = errno;
    if (device) munmap(reinterpret_cast<void*>(device), bytes);
    return fail(BPSIM_SYSTEM,
                "card %d: the system refused %s of address space (%s). A card reserves eight times its memory as "
                "address space: lower the memory per card, or raise the limit (ulimit -v)",
                card, size_text(bytes).c_str(), std::strerror(error));
  }
  exclude_from_fork(reinterpret_cast<void*>(kernel), bytes);
  arena->reset(new Arena(card, device, kernel, bytes));
  return BPSIM_OK;
}

Arena::Arena(int32_t card, uintptr_t base, uintptr_t kernel_base, uint64_t bytes)
    : card_(card), base_(base), bytes_(bytes), kernel_offset_(static_cast<ptrdiff_t>(kernel_base - base)) {
  holes_[base] = bytes;
}

Arena::~Arena() {
  munmap(kernel_pointer(base_), bytes_);
  munmap(reinterpret_cast<void*>(base_), bytes_);
}

bpsim_status Arena::take(uint64_t bytes, uintptr_t* address) {
  const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const auto& each) { return each.second >= bytes; });
  if (hole == holes_.end()) return BPSIM_OUT_OF_MEMORY;
  const uintptr_t start = hole->first;
  const uint64_t rest = hole->second - bytes;
  const bpsim_status status = commit(start, bytes);
  if (status != BPSIM_OK) return status;
  holes_.erase(hole);
  if (rest) holes_[start + bytes] = rest;
  *address = start;
  return BPSIM_OK;
}

void Arena::give_back(uintptr_t address, uint64_t bytes) {
  decommit(address, bytes);
  auto after = holes_.lower_bound(address);
  if (after != holes_.end() && after->first == address + bytes) {
    bytes += after->second;
    after = holes_.erase(after);
  }
  if (after != holes_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == address) {
      before->second += bytes;
      return;
    }
  }
  holes_[address] = bytes;
}

bpsim_status Arena::commit(uintptr_t address, uint64_t bytes) {
  void* const at = kernel_pointer(address);
  if (mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0)
    return fail(BPSIM_SYSTEM, "card %d: the system refused %s of memory for a segment (%s)", card_,
                size_text(bytes).c_str(), std::strerror(errno));
  madvise(at, bytes, MADV_HUGEPAGE);  // a hint: small pages work as well, only slower
  return BPSIM_OK;
}

void Arena::decommit(uintptr_t address, uint64_t bytes) {
  void* const at = kernel_pointer(address);
  // A new mapping also releases what the system has reserved for the old one. If it is refused (too many mappings), the
  // pages are still released; only a launch that uses freed memory is then not caught.
  if (reserve(at, bytes) == MAP_FAILED) madvise(at, bytes, MADV_DONTNEED);
  exclude_from_fork(at, bytes);
}

uint64_t Arena::resident() const {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  constexpr uint64_t step = 64 * kChunk;
  std::vector<unsigned char> present(step / page);
  uint64_t pages = 0;
  // Includes the holes, to verify that no memory remains behind them.
  for (uint64_t done = 0; done < bytes_; done += step) {
    const uint64_t bytes = std::min(step, bytes_ - done);
    if (mincore(kernel_pointer(base_ + done), bytes, present.data()) != 0) continue;
    const auto end = present.begin() + static_cast<ptrdiff_t>(bytes / page);
    pages += static_cast<uint64_t>(std::count_if(present.begin(), end, [](unsigned char flags) { return flags & 1; }));
  }
  return pages * page;
}

}  // namespace backplane::sim::driver
