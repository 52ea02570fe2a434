// Defines a pool: a set of segments, with their free blocks, that allocations of one kind are drawn from.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "blocks.h"

namespace backplane::sim::driver {

class Allocator;
class Card;

class Pool {
 public:
  // The general pool of an allocator has no card and is never dissolved.
  explicit Pool(Card* owner = nullptr) : card(owner) {}
  // Moves the segments to the general pool.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  Card* const card;
  bpsim_pool handle = 0;
  std::atomic<int> graphs{0};       // captured into it or being captured: they own its memory, freed or not
  std::atomic<bool> asleep{false};
  Bins small_blocks, large_blocks;  // under the allocator's lock
};

// Handles of pools. Holds the pools that the user has created; a graph holds its own pool.
class Pools {
 public:
  std::shared_ptr<Pool> create(Card& card, bool held);
  // Returns null for an invalid handle.
  std::shared_ptr<Pool> find(bpsim_pool handle);
  // Returns whether the user has created it.
  bool held(bpsim_pool handle);
  void drop(bpsim_pool handle);
  void clear();

 private:
  struct Entry {
    std::weak_ptr<Pool> pool;
    std::shared_ptr<Pool> hold;
  };
  std::mutex mutex_;
  std::unordered_map<bpsim_pool, Entry> entries_;
  bpsim_pool last_ = 0;
};

}  // namespace backplane::sim::driver
