// Memory of a captured graph: what its operators allocate lies where it lay at the capture, at every replay.
//
// While a thread records, its allocations come from the graph's pool, and each operator's are listed. While it replays,
// each operator is given the same places again, in the same order. So every tensor of the graph has one address for
// good: views need no replaying, and arguments can be made ready once.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace backplane::cpu {

class GraphPool;

struct GraphBlock {
  GraphPool* pool;
  c10::DataPtr memory;  // with a line ahead of the data that says whose it is
  void* data;
  size_t capacity;
  uint64_t taken = 0;     // how often it was taken: names one use of the block
  bool live = false;      // a tensor made during the capture has it
  bool written = false;   // by an operator that is part of the graph
  bool replaying = false; // a tensor made during a replay has it
};

// Lives as long as its graph or any tensor in it.
class GraphPool {
 public:
  static GraphPool* make();
  void hold();
  void leave();  // one hold less; a new pool has its graph's

  c10::DataPtr take(size_t bytes);
  size_t bytes() const { return bytes_; }

  // The block behind a pointer of this pool, or nothing for memory from elsewhere.
  GraphBlock* block_of(const c10::DataPtr& pointer) const;
  static void give_back(void* data);

  static int64_t alive();  // pools of the process

 private:
  GraphPool();
  ~GraphPool();

  mutable std::mutex lock_;
  std::vector<std::unique_ptr<GraphBlock>> blocks_;
  std::multimap<size_t, GraphBlock*> free_;
  size_t bytes_ = 0;
  int64_t holds_ = 1;
};

// One allocation of an operator at the capture; without a block where its place cannot be given again.
struct GraphAllocation {
  size_t bytes;
  GraphBlock* block;
  uint64_t taken;
};

// What this thread's allocations become until the object is gone.
class RecordAllocations {
 public:
  explicit RecordAllocations(GraphPool* pool);
  ~RecordAllocations();
  void list_into(std::vector<GraphAllocation>* list) { list_ = list; }

 private:
  friend class GraphAllocator;
  GraphPool* pool_;
  std::vector<GraphAllocation>* list_ = nullptr;
};

class ReplayAllocations {
 public:
  ReplayAllocations();
  ~ReplayAllocations();
  void next(const std::vector<GraphAllocation>* list) {
    list_ = list;
    place_ = 0;
  }

 private:
  friend class GraphAllocator;
  const std::vector<GraphAllocation>* list_ = nullptr;
  size_t place_ = 0;
};

// Stands in front of PyTorch's allocator of the host from the first capture on; other threads' allocations, and all
// outside of captures and replays, go straight through.
void install_graph_allocator();

// PyTorch's own, which is behind it.
c10::Allocator* host_allocator();

}  // namespace backplane::cpu
