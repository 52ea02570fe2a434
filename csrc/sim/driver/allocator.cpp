// Implements the life of a block: allocation, splitting, freeing, merging.

#include "allocator.h"

#include <algorithm>

#include "card.h"
#include "error.h"
#include "process.h"
#include "stream.h"

namespace backplane::sim::driver {
namespace {

constexpr uint64_t kUnit = 512;
constexpr uint64_t kSmall = 1u << 20;          // requests up to this are small
constexpr uint64_t kShared = 10u << 20;        // large requests up to this share segments
constexpr uint64_t kSharedSegment = 20u << 20;

}  // namespace

Allocator::Allocator(Card& card, Arena& arena, uint64_t limit)
    : card_(card), arena_(arena), limit_(limit), table_(arena) {
  counts_.limit = limit;
}

Block* Allocator::block_at(uintptr_t address) {
  const auto after = by_address_.upper_bound(address);
  if (after == by_address_.begin()) return nullptr;
  Block* const block = std::prev(after)->second;
  return address < block->end() ? block : nullptr;
}

bpsim_status Allocator::refuse_asleep() const {
  return fail(BPSIM_INVALID, "card %d: the pool is suspended: resume it before allocating from it", card_.index());
}

bpsim_status Allocator::allocate(Stream& stream, Pool& pool, uint64_t bytes, void** pointer) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (pool.asleep.load()) return refuse_asleep();
  if (bytes > limit_) return out_of_memory_locked(bytes, "");
  const uint64_t rounded = round_up(bytes, kUnit);
  bpsim_status status = BPSIM_OK;
  collect_pending();
  Block* block = find_or_grow(stream, pool, rounded, &status);
  if (!block && status == BPSIM_OUT_OF_MEMORY) {
    release_cached();
    block = find_or_grow(stream, pool, rounded, &status);
  }
  if (!block && status == BPSIM_OUT_OF_MEMORY && waits_for_streams()) {
    // Freed memory may only be waiting for work in flight: wait for that work as well.
    lock.unlock();
    const bool drained = card_.drain();
    lock.lock();
    if (pool.asleep.load()) return refuse_asleep();  // the lock was released meanwhile
    if (drained) {
      collect_pending();
      release_cached();
      block = find_or_grow(stream, pool, rounded, &status);
    }
  }
  if (!block) return status == BPSIM_OUT_OF_MEMORY ? out_of_memory_locked(bytes, "") : status;
  hand_out(block, stream, bytes, rounded);
  *pointer = reinterpret_cast<void*>(block->start());
  return BPSIM_OK;
}

Block* Allocator::find_or_grow(Stream& stream, Pool& pool, uint64_t rounded, bpsim_status* status) {
  Bins& bins = rounded <= kSmall ? pool.small_blocks : pool.large_blocks;
  Block* block = bins.find(rounded, &stream);
  if (!block) block = grow(pool, rounded, status);
  return block;
}

Block* Allocator::grow(Pool& pool, uint64_t rounded, bpsim_status* status) {
  const bool small = rounded <= kSmall;
  const uint64_t exact = round_up(rounded, kChunk);
  uint64_t bytes = small ? kChunk : rounded <= kShared ? kSharedSegment : exact;
  if (counts_.reserved + bytes > limit_) bytes = exact;
  *status = BPSIM_OUT_OF_MEMORY;
  if (counts_.reserved + bytes > limit_) return nullptr;
  uintptr_t address = 0;
  *status = arena_.take(bytes, &address);
  if (*status != BPSIM_OK) return nullptr;

  Segment* const segment = segment_store_.take();
  Block* const block = block_store_.take();
  block->address.store(address);
  block->bytes.store(bytes);
  block->requested.store(0);
  block->state.store(BlockState::Free);
  block->after.store(nullptr);
  block->before = nullptr;
  block->segment = segment;
  block->stream = nullptr;
  segment->address.store(address);
  segment->bytes.store(bytes);
  segment->asleep.store(false);
  segment->pool = &pool;
  segment->small = small;
  segment->first.store(block);
  table_.enter(segment);
  segments_[address] = segment;
  by_address_[address] = block;
  bins_of(segment).insert(block);
  counts_.reserved += bytes;
  ++counts_.segments;
  raise_peaks();
  return block;
}

void Allocator::hand_out(Block* block, Stream& stream, uint64_t requested, uint64_t rounded) {
  Bins& bins = bins_of(block->segment);
  bins.remove(block);
  if (block->size() > rounded) {
    Block* const rest = block_store_.take();
    rest->address.store(block->start() + rounded);
    rest->bytes.store(block->size() - rounded);
    rest->requested.store(0);
    rest->state.store(BlockState::Free);
    rest->after.store(block->next());
    rest->before = block;
    rest->segment = block->segment;
    rest->stream = block->stream;
    rest->sequence = block->sequence;
    if (block->next()) block->next()->before = rest;
    block->bytes.store(rounded);
    block->after.store(rest);
    by_address_[rest->start()] = rest;
    bins.insert(rest);
  }
  block->requested.store(requested);
  block->state.store(BlockState::Used);
  block->serial = ++serial_;
  block->stream = &stream;
  block->others.clear();
  counts_.in_use += rounded;
  counts_.requested += requested;
  ++counts_.allocations;
  raise_peaks();
}

bpsim_status Allocator::release(void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(mutex_);
  Block* const block = block_at(address);
  if (!block || block->is() != BlockState::Used)
    return fail(BPSIM_INVALID,
                "free: %p is in card %d's memory but not allocated; it was freed before, or never allocated", pointer,
                card_.index());
  if (block->start() != address)
    return fail(BPSIM_INVALID, "free: %p is %llu bytes into the allocation %p of card %d: free that one", pointer,
                static_cast<unsigned long long>(address - block->start()), reinterpret_cast<void*>(block->start()),
                card_.index());
  (block->segment->asleep.load() ? counts_.suspended : counts_.in_use) -= block->size();
  counts_.requested -= block->requested.load();
  ++counts_.frees;
  if (Races& races = card_.driver().races; races.on()) {
    std::vector<const Stream*> users{block->stream};
    for (const auto& use : block->others) users.push_back(use.first);
    races.freed(block->start(), block->size(), users);
  }
  block->sequence = block->stream->submitted();
  settle(block);
  auto& others = block->others;
  for (auto& [stream, sequence] : others) sequence = stream->submitted();
  others.erase(std::remove_if(others.begin(), others.end(),
                              [](const auto& use) { return use.first->finished(use.second); }),
               others.end());
  if (others.empty()) {
    make_free(block);
  } else {
    block->state.store(BlockState::Pending);
    counts_.pending += block->size();
    pending_.push_back(block);
  }
  return BPSIM_OK;
}

bpsim_status Allocator::record_stream(void* pointer, Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Block* const block = block_at(reinterpret_cast<uintptr_t>(pointer));
  if (!block || block->is() != BlockState::Used)
    return fail(BPSIM_INVALID, "record_stream: %p is in card %d's memory but not allocated", pointer, card_.index());
  if (block->stream == &stream) return BPSIM_OK;
  for (const auto& use : block->others)
    if (use.first == &stream) return BPSIM_OK;
  block->others.emplace_back(&stream, 0);
  return BPSIM_OK;
}

// Clears the stream of a free block whose work is done: any stream may use it.
void Allocator::settle(Block* block) {
  if (block->stream && block->stream->finished(block->sequence)) block->stream = nullptr;
}

bool Allocator::can_merge(Block* block, Block* next) {
  if (!block || !next || block->is() != BlockState::Free || next->is() != BlockState::Free) return false;
  settle(block);
  settle(next);
  return !block->stream || !next->stream || block->stream == next->stream;
}

// Merges `next` into `block`. Neither may be in a bin.
Block* Allocator::merge(Block* block, Block* next) {
  if (!block->stream) {
    block->stream = next->stream;
    block->sequence = next->sequence;
  } else if (next->stream) {
    block->sequence = std::max(block->sequence, next->sequence);
  }
  by_address_.erase(next->start());
  block->after.store(next->next());
  if (next->next()) next->next()->before = block;
  block->bytes.store(block->size() + next->size());
  block_store_.give_back(next);
  return block;
}

void Allocator::make_free(Block* block) {
  block->state.store(BlockState::Free);
  block->requested.store(0);
  block->others.clear();
  Bins& bins = bins_of(block->segment);
  if (can_merge(block, block->next())) {
    bins.remove(block->next());
    block = merge(block, block->next());
  }
  if (can_merge(block->before, block)) {
    bins.remove(block->before);
    block = merge(block->before, block);
  }
  bins.insert(block);
}

void Allocator::collect_pending() {
  for (size_t i = 0; i < pending_.size();) {
    Block* const block = pending_[i];
    const bool done = std::all_of(block->others.begin(), block->others.end(),
                                  [](const auto& use) { return use.first->finished(use.second); });
    if (!done) {
      ++i;
      continue;
    }
    pending_[i] = pending_.back();
    pending_.pop_back();
    counts_.pending -= block->size();
    make_free(block);
  }
}

bool Allocator::holds(const Block* block, uint64_t serial) {
  std::lock_guard<std::mutex> lock(mutex_);
  return block->serial == serial && block->is() == BlockState::Used && !block->segment->asleep.load();
}

Located Allocator::locate(uintptr_t address) {
  Located found;
  std::lock_guard<std::mutex> lock(mutex_);
  Block* const block = block_at(address);
  if (!block) return found;
  found.block = block;
  found.start = block->start();
  found.bytes = block->size();
  found.requested = block->requested.load();
  found.serial = block->serial;
  found.state = block->is();
  found.asleep = block->segment->asleep.load();
  found.pool = block->segment->pool;
  found.stream = block->stream;
  return found;
}

void Allocator::raise_peaks() {
  counts_.in_use_peak = std::max(counts_.in_use_peak, counts_.in_use);
  counts_.reserved_peak = std::max(counts_.reserved_peak, counts_.reserved);
}

}  // namespace backplane::sim::driver
