// Memory of the cards as PyTorch's allocators, and where a host kernel's results are born.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/SmallVector.h>

#include "runtime/state.h"

namespace backplane::sim {

// Tells PyTorch of the allocators below; once, when the library is loaded.
void register_allocators();

// The allocator of the device, for storages.
c10::DeviceAllocator& device_memory();
at::HostAllocator& pinned_memory();
c10::DataPtr allocate_on(c10::DeviceIndex index, size_t bytes);

// A new tensor on a card; without strides it is contiguous.
at::Tensor new_tensor(c10::DeviceIndex index, c10::IntArrayRef sizes, at::ScalarType type);
at::Tensor new_tensor(c10::DeviceIndex index, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type);

// Gives a storage more room and keeps what it holds.
void grow(c10::StorageImpl& storage, size_t bytes);

// While one of these lives, host allocations of this thread that have exactly the size of a place are given that place:
// a CPU kernel that allocates its result itself then writes it straight into the card's memory. An allocation that
// happens to have the same size is given it too, which is harmless: whoever placed looks where the result really is.
class Placement {
 public:
  Placement();
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  void offer(void* place, size_t bytes) {
    if (bytes != 0) places_.push_back({place, bytes});
  }
  // From here on nothing is placed.
  void close() { places_.clear(); }
  // How many host tensors hold a place. A kernel that keeps one beyond its call would later write into memory that is
  // someone else's by then.
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
