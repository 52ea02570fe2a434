// Implements PyTorch's allocators of device and pinned memory, and the placement of a CPU kernel's results on the card.

#include "runtime/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

namespace backplane::sim {
namespace {

void release(void* pointer) {
  // Called from destructors, also at process exit after the driver has shut down; errors cannot be reported there.
  if (pointer != nullptr) bpsim_free(pointer);
}

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

void put(StatArray& into, uint64_t current, uint64_t peak) {
  Stat& all = into[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  all.current = static_cast<int64_t>(current);
  all.peak = static_cast<int64_t>(peak);
}

void count(StatArray& into, uint64_t allocated, uint64_t freed) {
  Stat& all = into[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  all.allocated = static_cast<int64_t>(allocated);
  all.freed = static_cast<int64_t>(freed);
  all.current = all.allocated - all.freed;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_card(), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    check(bpsim_copy_async(current_stream_of(current_card()), BPSIM_DEVICE_TO_DEVICE, to, from, bytes), "copying");
  }
  bool initialized() override { return started(); }
  void emptyCache(c10::MempoolId_t) override {
    if (!started()) return;
    for (int i = 0; i < card_count(); ++i) {
      const bpsim_status status = bpsim_empty_cache(i);
      // Another card that is lost does not concern the user of this one.
      if (status != BPSIM_LOST || i == current_card()) check(status, "emptying the cache");
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get() == nullptr) return;
    check(bpsim_record_stream(pointer.get_context(), handle_of(stream)), "record_stream");
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    card(index);
    bpsim_memory_stats now;
    check(bpsim_memory_statistics(index, &now), "memory statistics");
    c10::CachingDeviceAllocator::DeviceStats stats;
    put(stats.allocated_bytes, now.in_use, now.in_use_peak);
    put(stats.requested_bytes, now.requested, now.requested);
    put(stats.active_bytes, now.in_use + now.pending, now.in_use_peak);
    put(stats.reserved_bytes, now.reserved, now.reserved_peak);
    put(stats.segment, now.segments, now.segments);
    count(stats.allocation, now.allocations, now.frees);
    stats.num_ooms = static_cast<int64_t>(now.out_of_memory);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    TORCH_CHECK(false,
                "bpnpu counts allocations for the life of the process and cannot reset them; compare two readings");
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    card(index);
    check(bpsim_reset_peaks(index), "resetting peaks");
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    card(index);
    bpsim_memory_stats now;
    check(bpsim_memory_statistics(index, &now), "memory statistics");
    return {now.limit - now.reserved, now.limit};
  }
};

void release_pinned(void* pointer) {
  if (pointer != nullptr) bpsim_host_free(pointer);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    start();
    void* pointer = nullptr;
    if (bytes != 0) check(bpsim_host_alloc(bytes, &pointer), "allocating pinned host memory");
    return {pointer, pointer, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  // The driver itself keeps freed pinned memory until the copies that use it are done.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

thread_local Placement* placing = nullptr;
thread_local int held_places = 0;

void leave_place(void*) { --held_places; }

}  // namespace

// PyTorch's CPU allocator, except that results of launches are placed on the card. Other allocations go to the previous
// allocator.
struct PlacingAllocator final : c10::Allocator {
  explicit PlacingAllocator(c10::Allocator* usual) : usual_(usual) {}
  c10::DataPtr allocate(size_t bytes) override {
    if (C10_UNLIKELY(placing != nullptr)) {
      if (void* place = placing->take(bytes)) {
        ++held_places;
        // The context differs from the data pointer, so PyTorch's raw allocation interface, which would free it
        // wrongly, refuses the pointer.
        return {place, &held_places, &leave_place, c10::Device(c10::DeviceType::CPU)};
      }
    }
    return usual_->allocate(bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override { return usual_->is_simple_data_ptr(pointer); }
  c10::DeleterFnPtr raw_deleter() const override { return usual_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { usual_->copy_data(to, from, bytes); }

 private:
  c10::Allocator* usual_;
};

Placement::Placement() : outer_(placing), held_before_(held_places) { placing = this; }
Placement::~Placement() { placing = outer_; }
int Placement::held() const { return held_places - held_before_; }

void* Placement::take(size_t bytes) {
  for (auto place = places_.begin(); place != places_.end(); ++place) {
    if (place->bytes == bytes) {
      void* const data = place->data;
      places_.erase(place);
      return data;
    }
  }
  return nullptr;
}

c10::DeviceAllocator& device_memory() {
  static DeviceMemory* const only = new DeviceMemory;
  return *only;
}

at::HostAllocator& pinned_memory() {
  static PinnedMemory* const only = new PinnedMemory;
  return *only;
}

void register_allocators() {
  c10::SetAllocator(kType, &device_memory());
  at::setHostAllocator(kType, &pinned_memory());
  static PlacingAllocator* const placer = new PlacingAllocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(placer, /*priority=*/1);
}

c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes) {
  void* pointer = nullptr;
  check(bpsim_alloc(current_stream_of(index), current_pool(), bytes, &pointer), "allocating");
  return {pointer, pointer, &release, c10::Device(kType, index)};
}

at::Tensor new_tensor(c10::DeviceIndex index, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type) {
  const caffe2::TypeMeta meta = c10::scalarTypeToTypeMeta(type);
  const size_t bytes = strides.data() == nullptr
                           ? at::detail::computeStorageNbytesContiguous(sizes, meta.itemsize())
                           : at::detail::computeStorageNbytes(sizes, strides, meta.itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       allocate_on(index, bytes), &device_memory(),
                                                       /*resizable=*/true);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta);
  if (strides.data() != nullptr) {
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  } else if (sizes.size() != 1 || sizes[0] != 0) {  // a new tensor already has this shape
    made.unsafeGetTensorImpl()->generic_set_sizes_contiguous(sizes);
  }
  return made;
}

at::Tensor new_tensor(c10::DeviceIndex index, c10::IntArrayRef sizes, at::ScalarType type) {
  return new_tensor(index, sizes, c10::IntArrayRef(), type);
}

void grow(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "bpnpu: this storage cannot be resized");
  const c10::DeviceIndex index = storage.device().index();
  c10::DataPtr larger = allocate_on(index, bytes);
  const size_t kept = std::min(storage.nbytes(), bytes);
  if (kept != 0)
    check(bpsim_copy_async(current_stream_of(index), BPSIM_DEVICE_TO_DEVICE, larger.get(), storage.data(), kept),
          "resizing");
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

}  // namespace backplane::sim
