// Declares PyTorch's allocators for the cards' memory, and the placement of a CPU kernel's results in it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/SmallVector.h>

#include "runtime/state.h"

namespace backplane::sim {

// Registers the allocators below with PyTorch; called once, when the library is loaded.
void register_allocators();

// The device allocator, for storages.
c10::DeviceAllocator& device_memory();
at::HostAllocator& pinned_memory();
c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes);

// Makes a new tensor on a card; without strides it is contiguous.
at::Tensor new_tensor(c10::DeviceIndex index, c10::IntArrayRef sizes, at::ScalarType type);
at::Tensor new_tensor(c10::DeviceIndex index, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type);

// Enlarges a storage and keeps its contents.
void grow(c10::StorageImpl& storage, size_t bytes);

// During its lifetime, CPU allocations of this thread whose size is exactly that of an offered address get that
// address: a CPU kernel that allocates its result itself then writes it straight into the card's memory. Another
// allocation of the same size may get it too. That is harmless, because the caller checks where the result really is.
class Placement {
 public:
  Placement();
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  void offer(void* place, size_t bytes) {
    if (bytes != 0) places_.push_back({place, bytes});
  }
  // Withdraws the offered addresses.
  void close() { places_.clear(); }
  // Returns how many CPU tensors hold an offered address. A kernel that keeps one after its call would later write into
  // memory that belongs to another tensor.
  int held() const;

  void* take(size_t bytes);

 private:
  struct Place {
    void* data;
    size_t bytes;
  };
  c10::SmallVector<Place, 4> places_;
  Placement* outer_;
  int held_before_;
};

}  // namespace backplane::sim
