// What a card's memory is cut into, and where it is looked up.
//
// A segment is a piece of the arena with memory behind it; its blocks lie side by side and cover it. Both come from
// stores that never give memory back while the driver lives, and what names them is atomic: so the handler of a stray
// access can walk from an address to its block with no lock and no allocation, whatever other threads do meanwhile.
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
  Free,    // may be given out, by the rules of its stream
  Used,    // held by the user
  Pending  // freed, and another stream than its own may still work on it
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

  uint64_t serial = 0;  // of the allocation: no two have the same
  // Used: the stream it was allocated for. Free: the work on it is done when `stream` has finished `sequence`; null:
  // it is done.
  Stream* stream = nullptr;
  uint64_t sequence = 0;
  std::vector<std::pair<Stream*, uint64_t>> others;  // that use it too; the sequences are filled in when it is freed

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
  std::atomic<bool> asleep{false};  // its pool is suspended: no memory is behind it
  Pool* pool = nullptr;
  bool small = false;

  uintptr_t start() const { return address.load(std::memory_order_relaxed); }
  uint64_t size() const { return bytes.load(std::memory_order_relaxed); }
};

// Objects that stay at their address and stay readable when they are given back.
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

// From an address to its segment and block. Changed under the allocator's lock, read by anybody.
class BlockTable {
 public:
  explicit BlockTable(const Arena& arena);
  void enter(Segment* segment);
  void remove(const Segment* segment);
  Segment* segment_at(uintptr_t address) const;
  // Walks: for the handler of stray accesses; nullptr where there is none, or it changed on the way.
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
  // The smallest block in the first bin that has one that is large enough and that `stream` may have at once.
  Block* find(uint64_t bytes, const Stream* stream) const;
  // Calls visit(Block*) for each; it must not change the bins.
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
