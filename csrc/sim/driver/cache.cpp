// Implements the allocator's cache as a whole: returns segments to the card, and computes statistics.
#include <algorithm>

#include "allocator.h"
#include "card.h"
#include "error.h"
#include "stream.h"

namespace backplane::sim::driver {

// Merges neighbours that could not be merged when they were freed, because different streams were using them.
void Allocator::tidy() {
  for (const auto& [address, segment] : segments_) {
    Bins& bins = bins_of(segment);
    for (Block* block = segment->first.load(); block;) {
      Block* const next = block->next();
      if (!can_merge(block, next)) {
        block = next;
        continue;
      }
      bins.remove(block);
      bins.remove(next);
      bins.insert(merge(block, next));
    }
  }
}

bool Allocator::releasable(const Segment* segment) const {
  Block* const block = segment->first.load();
  if (block->is() != BlockState::Free || block->next()) return false;
  if (segment->pool->graphs.load() != 0 || segment->asleep.load()) return false;
  settle(block);
  return !block->stream;
}

void Allocator::release_cached() {
  tidy();
  for (auto each = segments_.begin(); each != segments_.end();) {
    Segment* const segment = each->second;
    if (!releasable(segment)) {
      ++each;
      continue;
    }
    Block* const block = segment->first.load();
    bins_of(segment).remove(block);
    by_address_.erase(block->start());
    table_.remove(segment);
    arena_.give_back(segment->start(), segment->size());
    counts_.reserved -= segment->size();
    --counts_.segments;
    block_store_.give_back(block);
    segment_store_.give_back(segment);
    each = segments_.erase(each);
  }
}

void Allocator::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  collect_pending();
  release_cached();
}

// Returns whether waiting for the card's streams would free any memory.
bool Allocator::waits_for_streams() {
  if (!pending_.empty()) return true;
  for (const auto& [address, block] : by_address_) {
    if (block->is() != BlockState::Free) continue;
    settle(block);
    if (block->stream) return true;
  }
  return false;
}

Allocator::Sums Allocator::sums() {
  Sums sums;
  for (const auto& [address, segment] : segments_) {
    if (releasable(segment)) {
      sums.releasable += segment->size();
    } else if (segment->pool == &general_ && !segment->asleep.load()) {
      for (const Block* block = segment->first.load(); block; block = block->next())
        if (block->is() == BlockState::Free) sums.largest_piece = std::max(sums.largest_piece, block->size());
    }
  }
  return sums;
}

uint64_t Allocator::largest_free() {
  const Sums now = sums();
  return std::max(now.largest_piece, limit_ - (counts_.reserved - now.releasable));
}

void Allocator::statistics(bpsim_memory_stats* stats) {
  std::lock_guard<std::mutex> lock(mutex_);
  collect_pending();
  *stats = counts_;
  stats->largest_free = largest_free();
}

void Allocator::reset_peaks() {
  std::lock_guard<std::mutex> lock(mutex_);
  counts_.in_use_peak = counts_.in_use;
  counts_.reserved_peak = counts_.reserved;
}

uint64_t Allocator::resident() {
  std::lock_guard<std::mutex> lock(mutex_);
  return arena_.resident();
}

uint64_t Allocator::blocks(const Pool* pool, bpsim_block_info* info, uint64_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t count = 0;
  for (const auto& [address, block] : by_address_) {
    if (block->is() != BlockState::Used || (pool && block->segment->pool != pool)) continue;
    if (count < capacity) {
      bpsim_block_info& to = info[count];
      to.place = block->segment->asleep.load() ? BPSIM_DEVICE_ASLEEP : BPSIM_DEVICE;
      to.card = card_.index();
      to.base = reinterpret_cast<void*>(address);
      to.bytes = block->requested.load();
      to.rounded = block->size();
      to.pool = block->segment->pool->handle;
      to.stream = block->stream->handle();
    }
    ++count;
  }
  return count;
}

bpsim_status Allocator::out_of_memory(uint64_t bytes, const char* why) {
  std::lock_guard<std::mutex> lock(mutex_);
  return out_of_memory_locked(bytes, why);
}

bpsim_status Allocator::out_of_memory_locked(uint64_t bytes, const char* why) {
  ++counts_.out_of_memory;
  return fail(BPSIM_OUT_OF_MEMORY,
              "card %d: out of memory%s: requested %s; %s of %s are free, the largest free block has %s. In use: %s; "
              "kept by the cache and by pools: %s; freed but waiting for a stream: %s. Free memory that is not needed, "
              "use smaller batches or a smaller KV cache, or give the card more memory",
              card_.index(), why, size_text(bytes).c_str(), size_text(limit_ - counts_.in_use).c_str(),
              size_text(limit_).c_str(), size_text(largest_free()).c_str(), size_text(counts_.in_use).c_str(),
              size_text(counts_.reserved - counts_.in_use).c_str(), size_text(counts_.pending).c_str());
}

}  // namespace backplane::sim::driver
