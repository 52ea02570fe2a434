// Implements tensors without arithmetic: new ones, views, resizing, and copies between host and cards.

#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>

#include "runtime/counters.h"
#include "runtime/launch.h"
#include "runtime/memory.h"

namespace backplane::sim {
namespace {

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_card();
}

void refuse_options(std::optional<c10::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "bpnpu supports dense (strided) tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pinned,
                 std::optional<c10::MemoryFormat> format) {
  refuse_options(layout, pinned);
  at::detail::check_size_nonnegative(sizes);
  at::Tensor made = new_tensor(index_of(device), sizes, c10::dtype_or_default(type));
  if (format.has_value() && *format != c10::MemoryFormat::Contiguous)
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pinned) {
  refuse_options(layout, pinned);
  at::detail::check_size_nonnegative(sizes);
  TORCH_CHECK(sizes.size() == strides.size(), "empty_strided: sizes and strides must have the same length");
  return new_tensor(index_of(device), sizes, strides, c10::dtype_or_default(type));
}

// --- views --------------------------------------------------------------------------------------------------------------

void fit_storage(c10::TensorImpl* self) {
  if (self->numel() == 0) return;
  const size_t needed = at::detail::computeStorageNbytes(self->sizes(), self->strides(), self->itemsize(),
                                                         self->storage_offset());
  c10::StorageImpl* const storage = self->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) grow(*storage, needed);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    fit_storage(impl);
  }
  if (format.has_value() && *format != c10::MemoryFormat::Contiguous) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "resize_: torch.preserve_format is not supported");
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_from_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                             c10::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(source), offset, sizes, strides);
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  if (strides.data() == nullptr && !sizes.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  fit_storage(impl);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_from_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_from_tensor(at::Tensor& self, const at::Tensor& source) {
  if (!self.is_same(source))
    set_from_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  return self;
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                       allocate_on(self.device().index(), 0), &device_memory(), true);
  return set_from_storage(self, c10::Storage(std::move(storage)), 0, {0}, {});
}

// --- copies -------------------------------------------------------------------------------------------------------------

bool ours(const at::Tensor& tensor) { return tensor.device().type() == kType; }

// Returns whether both have the same bytes in the same order, so that one contiguous run can be copied.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) return false;
  return (a.is_contiguous() && b.is_contiguous()) ||
         (a.strides() == b.strides() && a.is_non_overlapping_and_dense());
}

void copy_on_card(const at::Tensor& to, const at::Tensor& from) {
  const c10::DeviceIndex index = to.device().index();
  if (same_bytes(to, from)) {
    check(bpsim_copy_async(current_stream_of(index), BPSIM_DEVICE_TO_DEVICE, to.mutable_data_ptr(),
                           from.const_data_ptr(), to.nbytes()),
          "copying on the card");
    return;
  }
  enqueue("aten::copy_", index, {{from, false}, {to, true}},
          [to = HostView(to), from = HostView(from)] { to.tensor().copy_(from.tensor()); });
}

// The streams of both cards synchronize before and after, so that no work on either overtakes the copy.
void copy_to_peer(const at::Tensor& to, const at::Tensor& from) {
  const at::Tensor source = same_bytes(to, from) ? from : from.to(to.scalar_type()).contiguous();
  const at::Tensor target = same_bytes(to, source) ? to : at::empty_strided(to.sizes(), source.strides(), to.options());
  const bpsim_stream here = current_stream_of(to.device().index()), there = current_stream_of(from.device().index());
  struct Meeting {
    bpsim_event event = 0;
    Meeting() { check(bpsim_event_create(0, &event), "copying between cards"); }
    ~Meeting() { bpsim_event_destroy(event); }
  } const meeting;
  const auto meet = [&](bpsim_stream first, bpsim_stream second) {
    check(bpsim_event_record(meeting.event, first), "copying between cards");
    check(bpsim_stream_wait_event(second, meeting.event), "copying between cards");
  };
  meet(here, there);
  check(bpsim_copy_async(there, BPSIM_PEER, target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes()),
        "copying between cards");
  meet(there, here);
  if (!target.is_same(to)) copy_on_card(to, target);
}

// A caller that waits for the copy may change the source right after it; the driver stages pageable memory or waits for
// it.
void copy_to_card(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const at::Tensor source = same_bytes(to, from) ? from : from.to(to.scalar_type()).contiguous();
  const at::Tensor target = same_bytes(to, source) ? to : at::empty_strided(to.sizes(), source.strides(), to.options());
  const bool pinned = !non_blocking && source.is_pinned();
  const auto copy = pinned ? &bpsim_copy : &bpsim_copy_async;
  check(copy(current_stream_of(to.device().index()), BPSIM_HOST_TO_DEVICE, target.mutable_data_ptr(),
             source.const_data_ptr(), target.nbytes()),
        "copying to the card");
  if (!target.is_same(to)) copy_on_card(to, target);
}

void copy_to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const c10::DeviceIndex index = from.device().index();
  at::Tensor source = from;
  if (!same_bytes(to, from)) {
    source = new_tensor(index, from.sizes(), to.scalar_type());
    copy_on_card(source, from);
  }
  const at::Tensor target = same_bytes(to, source) ? to : at::empty_strided(to.sizes(), source.strides(), to.options());
  const bool direct = target.is_same(to);
  const auto copy = non_blocking && direct ? &bpsim_copy_async : &bpsim_copy;
  check(copy(current_stream_of(index), BPSIM_DEVICE_TO_HOST, target.mutable_data_ptr(), source.const_data_ptr(),
             target.nbytes()),
        "copying to the host");
  if (!direct) to.copy_(target);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK(self.defined() && source.defined(), "copy_: both tensors must be defined");
  if (self.is_same(source)) return self;
  at::Tensor from = source.is_neg() || source.is_conj() ? source.resolve_conj().resolve_neg() : source;
  if (from.sizes() != self.sizes()) from = from.expand_as(self);
  if (self.numel() == 0) return self;
  if (ours(self) && ours(from)) {
    if (self.device() == from.device()) copy_on_card(self, from);
    else copy_to_peer(self, from);
  } else if (ours(self)) {
    TORCH_CHECK(from.device().is_cpu(), "bpnpu copies from the host and its own cards, not from ", from.device());
    copy_to_card(self, from, non_blocking);
  } else {
    TORCH_CHECK(self.device().is_cpu(), "bpnpu copies to the host and its own cards, not to ", self.device());
    copy_to_host(self, from, non_blocking);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  return copy_(target, from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_output(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  TORCH_CHECK(self.numel() == 1, "a tensor with ", self.numel(), " elements cannot be converted to Scalar");
  count_wait("aten::_local_scalar_dense");
  at::Tensor value = at::empty_strided({}, {}, self.options().device(c10::kCPU));
  check(bpsim_copy(current_stream_of(self.device().index()), BPSIM_DEVICE_TO_HOST, value.mutable_data_ptr(),
                   self.const_data_ptr(), self.itemsize()),
        "reading a number");
  return value.item();
}

// Makes the pages read as zeros. The first call discards pages of shared memory, if the driver's memory were shared; it
// fails on private memory, which the second call discards.
bool forget_pages(char* first, char* last) {
  const size_t bytes = static_cast<size_t>(last - first);
  return madvise(first, bytes, MADV_REMOVE) == 0 || madvise(first, bytes, MADV_DONTNEED) == 0;
}

// Whole pages are returned to the system instead of written, so a large cache that was never written takes no host
// memory.
void zero(char* data, size_t bytes) {
  constexpr size_t kWorthwhile = 1 << 20;
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes >= kWorthwhile) {
    char* const first = data + (page - reinterpret_cast<uintptr_t>(data) % page) % page;
    char* const last = data + bytes - reinterpret_cast<uintptr_t>(data + bytes) % page;
    if (forget_pages(first, last)) {
      std::memset(data, 0, static_cast<size_t>(first - data));
      std::memset(last, 0, static_cast<size_t>(data + bytes - last));
      return;
    }
  }
  std::memset(data, 0, bytes);
}

at::Tensor& zero_(at::Tensor& self) {
  if (self.numel() == 0) return self;
  const bool dense = self.is_non_overlapping_and_dense();
  enqueue("aten::zero_", self.device().index(), {{self, true}}, [to = HostView(self), bytes = self.nbytes(), dense] {
    if (dense) zero(static_cast<char*>(to.data), bytes);
    else to.tensor().zero_();
  });
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) { device_memory().recordStream(self.storage().data_ptr(), stream); }

}  // namespace
}  // namespace backplane::sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using namespace backplane::sim;
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_from_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_from_tensor);
  library.impl("set_", &set_to_nothing);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("zero_", &zero_);
  library.impl("record_stream", &record_stream);
}
