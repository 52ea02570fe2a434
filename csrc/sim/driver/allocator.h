// Declares the caching allocator of one card.
//
// Memory is taken from the card in segments and allocated in blocks; a freed block stays in the cache. Small blocks (up
// to 1 MiB) and large ones have separate segments, so that a small one does not hold a large segment. A free block
// carries the stream that used it last and the sequence number that this stream must finish before another stream may
// use the block. The same stream may use it at once, because it works in order.
//
// allocator.cpp implements the life of a block, cache.cpp the cache as a whole, pool.cpp operations on pools.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "arena.h"
#include "blocks.h"
#include "pool.h"

namespace backplane::sim::driver {

class Card;

// A copy of what is at an address, valid without the lock.
struct Located {
  Block* block = nullptr;  // of the allocation; null if there is no segment
  uintptr_t start = 0;
  uint64_t bytes = 0, requested = 0, serial = 0;
  BlockState state = BlockState::Free;
  bool asleep = false;
  Pool* pool = nullptr;
  Stream* stream = nullptr;
};

class Allocator {
 public:
  Allocator(Card& card, Arena& arena, uint64_t limit);

  bpsim_status allocate(Stream& stream, Pool& pool, uint64_t bytes, void** pointer);
  bpsim_status release(void* pointer);
  bpsim_status record_stream(void* pointer, Stream& stream);
  void empty_cache();

  void statistics(bpsim_memory_stats* stats);
  void reset_peaks();
  uint64_t resident();
  Located locate(uintptr_t address);
  // Returns whether the allocation still has this serial number and memory behind it. Cheap.
  bool holds(const Block* block, uint64_t serial);
  uint64_t blocks(const Pool* pool, bpsim_block_info* info, uint64_t capacity);
  // Counts an allocation that failed, and returns its status with the error text; `why` is inserted into the text.
  bpsim_status out_of_memory(uint64_t bytes, const char* why);

  Pool& general() { return general_; }
  const BlockTable& table() const { return table_; }

  // Implemented in pool.cpp.
  bpsim_status suspend(Pool& pool);
  bpsim_status resume(Pool& pool);
  void dissolve(Pool& pool);

 private:
  struct Sums {  // bytes of unused segments, and of the largest free piece in the others
    uint64_t releasable = 0, largest_piece = 0;
  };

  Block* block_at(uintptr_t address);
  Block* find_or_grow(Stream& stream, Pool& pool, uint64_t rounded, bpsim_status* status);
  Block* grow(Pool& pool, uint64_t rounded, bpsim_status* status);
  void hand_out(Block* block, Stream& stream, uint64_t requested, uint64_t rounded);
  void make_free(Block* block);
  Block* merge(Block* block, Block* next);
  static bool can_merge(Block* block, Block* next);
  static void settle(Block* block);
  void collect_pending();
  void tidy();
  bool releasable(const Segment* segment) const;
  void release_cached();
  bool waits_for_streams();
  Sums sums();
  uint64_t largest_free();
  Bins& bins_of(const Segment* segment) {
    return segment->small ? segment->pool->small_blocks : segment->pool->large_blocks;
  }
  bpsim_status refuse_asleep() const;
  bpsim_status out_of_memory_locked(uint64_t bytes, const char* why);
  void raise_peaks();

  Card& card_;
  Arena& arena_;
  const uint64_t limit_;
  std::mutex mutex_;
  BlockTable table_;
  Store<Block> block_store_;
  Store<Segment> segment_store_;
  std::map<uintptr_t, Segment*> segments_;
  std::map<uintptr_t, Block*> by_address_;
  std::vector<Block*> pending_;
  Pool general_;
  uint64_t serial_ = 0;
  bpsim_memory_stats counts_{};
};

}  // namespace backplane::sim::driver
