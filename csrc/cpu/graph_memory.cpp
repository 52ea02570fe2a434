// Implements the memory pool of a captured graph, and the allocator that serves it.

#include "graph_memory.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <unordered_set>

namespace backplane::cpu {
namespace {

thread_local RecordAllocations* recording = nullptr;
thread_local ReplayAllocations* replaying = nullptr;
std::atomic<c10::Allocator*> behind{nullptr};
std::atomic<int64_t> pools{0};

constexpr size_t kLine = 64;

// PyTorch and oneDNN also allocate memory without an owner and free it by its address alone. So everything is found by
// address: a cache line in front of the data holds the block, and a set holds the addresses that have one.
GraphBlock*& owner_of(void* data) { return *reinterpret_cast<GraphBlock**>(static_cast<char*>(data) - kLine); }

std::mutex addresses_lock;
std::unordered_set<const void*>& addresses() {
  static auto* all = new std::unordered_set<const void*>();
  return *all;
}

void end_of_use(void* data) { owner_of(data)->replaying = false; }

void end_of_any(void* data) {
  bool ours;
  {
    std::lock_guard<std::mutex> hold(addresses_lock);
    ours = addresses().count(data) != 0;
  }
  if (!ours) host_allocator()->raw_deleter()(data);
  else if (owner_of(data)->replaying) end_of_use(data);
  else GraphPool::give_back(data);
}

}  // namespace

GraphPool::GraphPool() { ++pools; }
GraphPool::~GraphPool() {
  --pools;
  std::lock_guard<std::mutex> hold(addresses_lock);
  for (const auto& block : blocks_) addresses().erase(block->data);
}
int64_t GraphPool::alive() { return pools; }

GraphPool* GraphPool::make() { return new GraphPool(); }

c10::DataPtr GraphPool::take(size_t bytes) {
  std::lock_guard<std::mutex> hold(lock_);
  const size_t wanted = (bytes + kLine - 1) / kLine * kLine;
  GraphBlock* block = nullptr;
  // The smallest block that is large enough, unless more than half of it would be unused.
  const auto found = free_.lower_bound(wanted);
  if (found != free_.end() && found->first <= 2 * wanted) {
    block = found->second;
    free_.erase(found);
  } else {
    c10::DataPtr memory = host_allocator()->allocate(kLine + wanted);
    void* data = static_cast<char*>(memory.get()) + kLine;
    blocks_.push_back(std::make_unique<GraphBlock>(GraphBlock{this, std::move(memory), data, wanted}));
    block = blocks_.back().get();
    owner_of(data) = block;
    bytes_ += wanted;
    std::lock_guard<std::mutex> listed(addresses_lock);
    addresses().insert(data);
  }
  ++block->taken;
  block->live = true;
  block->written = false;
  ++holds_;
  return {block->data, block->data, &give_back, c10::Device(c10::kCPU)};
}

GraphBlock* GraphPool::block_of(const c10::DataPtr& pointer) const {
  if (pointer.get_deleter() != &give_back) return nullptr;
  GraphBlock* block = owner_of(pointer.get_context());
  return block->pool == this ? block : nullptr;
}

void GraphPool::give_back(void* data) {
  GraphBlock* block = owner_of(data);
  GraphPool* pool = block->pool;
  {
    std::lock_guard<std::mutex> hold(pool->lock_);
    block->live = false;
    pool->free_.emplace(block->capacity, block);
  }
  pool->leave();
}

void GraphPool::hold() {
  std::lock_guard<std::mutex> hold(lock_);
  ++holds_;
}

void GraphPool::leave() {
  bool last;
  {
    std::lock_guard<std::mutex> hold(lock_);
    last = --holds_ == 0;
  }
  if (last) delete this;
}

class GraphAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes != 0 && recording != nullptr) {
      c10::DataPtr pointer = recording->pool_->take(bytes);
      if (recording->list_ != nullptr) {
        GraphBlock* block = owner_of(pointer.get_context());
        recording->list_->push_back({bytes, block, block->taken});
      }
      return pointer;
    }
    if (bytes != 0 && replaying != nullptr && replaying->list_ != nullptr) {
      const auto& list = *replaying->list_;
      for (size_t i = replaying->place_; i < list.size(); ++i) {
        if (list[i].bytes != bytes) continue;
        replaying->place_ = i + 1;
        GraphBlock* block = list[i].block;
        if (block == nullptr || block->replaying) break;  // the address is in use by another tensor
        block->replaying = true;
        return {block->data, block->data, &end_of_use, c10::Device(c10::kCPU)};
      }
    }
    return host_allocator()->allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &end_of_any; }

  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

RecordAllocations::RecordAllocations(GraphPool* pool) : pool_(pool) { recording = this; }
RecordAllocations::~RecordAllocations() { recording = nullptr; }
ReplayAllocations::ReplayAllocations() { replaying = this; }
ReplayAllocations::~ReplayAllocations() { replaying = nullptr; }

void install_graph_allocator() {
  static const bool installed = [] {
    behind = c10::GetCPUAllocator();
    // Never destroyed, because tensors refer to their allocator. Its priority is that of this package's other
    // allocator, so the one that is installed later is called first.
    c10::SetCPUAllocator(new GraphAllocator(), /*priority=*/1);
    return true;
  }();
  (void)installed;
}

c10::Allocator* host_allocator() { return behind.load(std::memory_order_relaxed); }

}  // namespace backplane::cpu
