// Implements pools: creation, suspending, resuming, and moving their segments to the general pool.

#include "pool.h"

#include "allocator.h"
#include "card.h"
#include "process.h"
#include "error.h"

namespace backplane::sim::driver {

Pool::~Pool() {
  if (!card) return;
  card->allocator().dissolve(*this);
  card->driver().pools.drop(handle);
}

std::shared_ptr<Pool> Pools::create(Card& card, bool held) {
  auto pool = std::make_shared<Pool>(&card);
  std::lock_guard<std::mutex> lock(mutex_);
  pool->handle = ++last_;
  entries_[pool->handle] = Entry{pool, held ? pool : nullptr};
  return pool;
}

std::shared_ptr<Pool> Pools::find(bpsim_pool handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(handle);
  return found == entries_.end() ? nullptr : found->second.pool.lock();
}

bool Pools::held(bpsim_pool handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(handle);
  return found != entries_.end() && found->second.hold;
}

void Pools::drop(bpsim_pool handle) {
  Entry gone;  // destroyed after the lock is released: dissolving a pool takes the allocator's lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return;
  gone = std::move(found->second);
  entries_.erase(found);
}

void Pools::clear() {
  std::unordered_map<bpsim_pool, Entry> gone;
  std::lock_guard<std::mutex> lock(mutex_);
  gone.swap(entries_);
}

bpsim_status Allocator::suspend(Pool& pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pool.asleep.load()) return fail(BPSIM_INVALID, "card %d: the pool is already suspended", card_.index());
  collect_pending();
  for (const Block* block : pending_)
    if (block->segment->pool == &pool)
      return fail(BPSIM_INVALID,
                  "card %d: the pool cannot be suspended: a stream of another card still works on %p, which is freed. "
                  "Synchronize that card first",
                  card_.index(), reinterpret_cast<void*>(block->start()));
  pool.asleep.store(true);
  for (const auto& [address, segment] : segments_) {
    if (segment->pool != &pool) continue;
    for (const Block* block = segment->first.load(); block; block = block->next()) {
      if (block->is() != BlockState::Used) continue;
      counts_.in_use -= block->size();
      counts_.suspended += block->size();
    }
    segment->asleep.store(true);
    arena_.decommit(segment->start(), segment->size());
    counts_.reserved -= segment->size();
    --counts_.segments;
  }
  return BPSIM_OK;
}

bpsim_status Allocator::resume(Pool& pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!pool.asleep.load()) return fail(BPSIM_INVALID, "card %d: the pool is not suspended", card_.index());
  uint64_t needed = 0;
  for (const auto& [address, segment] : segments_)
    if (segment->pool == &pool) needed += segment->size();
  if (counts_.reserved + needed > limit_) {
    collect_pending();
    release_cached();
    if (counts_.reserved + needed > limit_) return out_of_memory_locked(needed, " while resuming a pool");
  }
  for (auto each = segments_.begin(); each != segments_.end(); ++each) {
    if (each->second->pool != &pool) continue;
    const bpsim_status status = arena_.commit(each->first, each->second->size());
    if (status == BPSIM_OK) continue;
    for (auto undone = segments_.begin(); undone != each; ++undone)
      if (undone->second->pool == &pool) arena_.decommit(undone->first, undone->second->size());
    return status;
  }
  for (const auto& [address, segment] : segments_) {
    if (segment->pool != &pool) continue;
    segment->asleep.store(false);
    counts_.reserved += segment->size();
    ++counts_.segments;
    for (const Block* block = segment->first.load(); block; block = block->next()) {
      if (block->is() != BlockState::Used) continue;
      counts_.in_use += block->size();
      counts_.suspended -= block->size();
    }
  }
  pool.asleep.store(false);
  raise_peaks();
  return BPSIM_OK;
}

void Allocator::dissolve(Pool& pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [address, segment] : segments_) {
    if (segment->pool != &pool) continue;
    Bins& from = bins_of(segment);
    segment->pool = &general_;
    // A graph's accesses to its pool are over when the graph is gone.
    if (card_.driver().races.on()) card_.driver().races.forget(segment->start(), segment->size());
    // Suspended only if the driver is shutting down: such memory must not be allocated.
    if (segment->asleep.load()) continue;
    Bins& to = bins_of(segment);
    for (Block* block = segment->first.load(); block; block = block->next()) {
      if (block->is() != BlockState::Free) continue;
      from.remove(block);
      to.insert(block);
    }
  }
}

}  // namespace backplane::sim::driver
