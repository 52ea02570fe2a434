// A pool: the free blocks of a set of segments that allocations of one kind are drawn from.
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
  // The general pool of an allocator has no card, and is not dissolved.
  explicit Pool(Card* owner = nullptr) : card(owner) {}
  // Segments go to the general pool.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  Card* const card;
  bpsim_pool handle = 0;
  std::atomic<int> graphs{0};       // that were captured into it, or are being: its memory is theirs, freed or not
  std::atomic<bool> asleep{false};
  Bins small_blocks, large_blocks;  // under the allocator's lock
};

// Handles of pools. A pool that the user has made is held here; one of a graph is held by the graph.
class Pools {
 public:
  std::shared_ptr<Pool> create(Card& card, bool held);
  // Null for a handle that is none.
  std::shared_ptr<Pool> find(bpsim_pool handle);
  // Whether the user has made it.
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
