// Implements allocation and lookup of pinned host memory.

#include "pinned.h"

#include <cstdlib>

#include "error.h"
#include "races.h"

namespace backplane::sim::driver {

bpsim_status Pinned::allocate(uint64_t bytes, void** pointer) {
  void* raw = nullptr;
  std::shared_ptr<void> memory;
  if (races_.on()) {
    memory = races_.guard().map(bytes);
    raw = memory.get();
  } else if (posix_memalign(&raw, 4096, bytes) == 0) {
    memory.reset(raw, std::free);
  }
  if (!memory) return fail(BPSIM_SYSTEM, "the host could not allocate %s of pinned memory", size_text(bytes).c_str());
  std::lock_guard<std::mutex> lock(mutex_);
  // Freed entries in this range are gone, or the system would not have returned the addresses again.
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw);
  entries_.erase(entries_.lower_bound(start), entries_.lower_bound(start + bytes));
  entries_[start] = Entry{memory, memory, bytes};
  *pointer = raw;
  return BPSIM_OK;
}

bpsim_status Pinned::release(void* pointer) {
  std::shared_ptr<void> last;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto each = entries_.begin(); each != entries_.end();)
    each = !each->second.hold && each->second.memory.expired() ? entries_.erase(each) : std::next(each);
  const auto found = entries_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == entries_.end() || !found->second.hold)
    return fail(BPSIM_INVALID, "host_free: %p is not pinned memory of this driver, or was freed before", pointer);
  // Copies in flight may still use it; the next user of the memory comes after them.
  if (races_.on()) races_.forget(found->first, found->second.bytes);
  last = std::move(found->second.hold);
  found->second.hold = nullptr;
  return BPSIM_OK;
}

Pinned::Found Pinned::find(uintptr_t address, bool* freed) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto after = entries_.upper_bound(address);
  if (after == entries_.begin()) return {};
  const auto& [start, entry] = *std::prev(after);
  if (address - start >= entry.bytes) return {};
  std::shared_ptr<const void> memory = entry.memory.lock();
  if (!memory) return {};  // gone; the address may belong to other memory by now
  *freed = !entry.hold;
  return {std::move(memory), start, entry.bytes};
}

}  // namespace backplane::sim::driver
