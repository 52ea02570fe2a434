// Manages the memory of a captured graph: what its operators allocate has the same address at every replay as at the
// capture.
//
// While a thread captures, its allocations come from the graph's pool, and those of each operator are recorded. While
// it replays, each operator gets the same addresses again, in the same order. So every tensor of the graph has one
// fixed address: views need no replay, and arguments can be prepared once.
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
  c10::DataPtr memory;  // with a cache line in front of the data that points to this block
  void* data;
  size_t capacity;
  uint64_t taken = 0;     // number of allocations so far: identifies one use of the block
  bool live = false;      // used by a tensor made during the capture
  bool written = false;   // by an operator that is part of the graph
  bool replaying = false; // used by a tensor made during a replay
};

// A reference-counted pool; lives as long as its graph or any tensor in it.
class GraphPool {
 public:
  static GraphPool* make();
  void hold();
  void leave();  // drops one reference; a new pool has that of its graph

  c10::DataPtr take(size_t bytes);
  size_t bytes() const { return bytes_; }

  // Returns the block of a pointer of this pool, or null for other memory.
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

// One allocation of an operator at the capture; its block is null if the address cannot be reused.
struct GraphAllocation {
  size_t bytes;
  GraphBlock* block;
  uint64_t taken;
};

// Redirects this thread's allocations to the pool during its lifetime.
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

// Installs an allocator in front of PyTorch's CPU allocator at the first capture. Allocations of other threads, and all
// outside of captures and replays, are passed on.
void install_graph_allocator();

// Returns PyTorch's own allocator, which is behind it.
c10::Allocator* host_allocator();

}  // namespace backplane::cpu
