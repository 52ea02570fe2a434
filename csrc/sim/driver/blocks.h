// Defines the segments and blocks of a card's memory, and their lookup by address.
//
// A segment is a piece of the arena with memory behind it; its blocks are adjacent and cover it. Both come from stores
// that never free memory while the driver lives, and the links between them are atomic. So the signal handler for stray
// accesses can walk from an address to its block without a lock or an allocation, whatever other threads do meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "arena.h"

namespace backplane::sim::driver {

class Pool;
class Stream;
struct Segment;

enum class BlockState : uint8_t {
  Free,    // may be allocated, by the rules of its stream
  Used,    // held by the user
  Pending  // freed, but another stream may still be using it
};

struct Block {
  std::atomic<uintptr_t> address{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> requested{0};
  std::atomic<BlockState> state{BlockState::Free};
  std::atomic<Block*> after{nullptr};  // the next in the segment
  Block* before = nullptr;
  Segment* segment = nullptr;

  Block* next_in_bin = nullptr;
  Block* previous_in_bin = nullptr;

  uint64_t serial = 0;  // unique number of the allocation
  // Used: the stream it was allocated for. Free: work on it is done when `stream` has finished `sequence`; null: it is
  // done.
  Stream* stream = nullptr;
  uint64_t sequence = 0;
  std::vector<std::pair<Stream*, uint64_t>> others;  // other streams that use it; sequences are set when it is freed

  uintptr_t start() const { return address.load(std::memory_order_relaxed); }
  uint64_t size() const { return bytes.load(std::memory_order_relaxed); }
  uintptr_t end() const { return start() + size(); }
  BlockState is() const { return state.load(std::memory_order_relaxed); }
  Block* next() const { return after.load(std::memory_order_relaxed); }
};

struct Segment {
  std::atomic<uintptr_t> address{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<Block*> first{nullptr};
  std::atomic<bool> asleep{false};  // its pool is suspended: there is no memory behind it
  Pool* pool = nullptr;
  bool small = false;

  uintptr_t start() const { return address.load(std::memory_order_relaxed); }
  uint64_t size() const { return bytes.load(std::memory_order_relaxed); }
};

// Allocates objects that keep their address and stay readable after they are returned.
template <class T>
class Store {
 public:
  T* take() {
    if (spare_.empty()) {
      all_.emplace_back();
      return &all_.back();
    }
    T* const object = spare_.back();
    spare_.pop_back();
    return object;
  }
  void give_back(T* object) { spare_.push_back(object); }

 private:
  std::deque<T> all_;
  std::vector<T*> spare_;
};

// Maps an address to its segment and block. Changed under the allocator's lock, read without it.
class BlockTable {
 public:
  explicit BlockTable(const Arena& arena);
  void enter(Segment* segment);
  void remove(const Segment* segment);
  Segment* segment_at(uintptr_t address) const;
  // Walks without a lock, for the signal handler; returns null if there is no block or it changed meanwhile.
  const Block* find_without_lock(uintptr_t address) const;

 private:
  const Arena& arena_;
  std::vector<std::atomic<Segment*>> chunks_;
};

// Free blocks of one kind, by size: eight bins for each power of two.
class Bins {
 public:
  void insert(Block* block);
  void remove(Block* block);
  // Returns the smallest block in the first bin that has one large enough and usable by `stream` at once.
  Block* find(uint64_t bytes, const Stream* stream) const;
  // Calls visit(Block*) for each block; it must not change the bins.
  template <class Visit>
  void each(Visit&& visit) const {
    for (Block* head : heads_)
      for (Block* block = head; block; block = block->next_in_bin) visit(block);
  }

 private:
  static constexpr unsigned kBins = 8 * 48;
  static unsigned bin_of(uint64_t bytes);
  Block* heads_[kBins] = {};
  uint64_t occupied_[kBins / 64] = {};
};

}  // namespace backplane::sim::driver
