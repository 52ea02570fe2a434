// Turns operator calls into launches: packs the arguments, queues the call, and runs the CPU kernel on the card's
// memory.

#include "runtime/launch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>

#include <cstring>

#include "runtime/generator.h"
#include "runtime/launch_detail.h"
#include "runtime/memory.h"
#include "runtime/workers.h"

namespace backplane::sim {
namespace {

using torch::jit::Stack;

at::Tensor host_tensor(void* data, const int64_t* dims, size_t rank, at::ScalarType type) {
  const c10::IntArrayRef sizes(dims, rank), strides(dims + rank, rank);
  const caffe2::TypeMeta meta = c10::scalarTypeToTypeMeta(type);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), at::detail::computeStorageNbytes(sizes, strides, meta.itemsize()),
      c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)), /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                             c10::DispatchKeySet(c10::DispatchKey::CPU), meta);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

uint8_t element_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return BPSIM_F32;
    case at::kHalf:
      return BPSIM_F16;
    case at::kBFloat16:
      return BPSIM_BF16;
    case at::kDouble:
      return BPSIM_F64;
    default:
      return BPSIM_OTHER;
  }
}

bpsim_range range_of(const at::Tensor& tensor, bool written) {
  const uint64_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  return {tensor.const_data_ptr(), bytes, element_of(tensor.scalar_type()), static_cast<uint8_t>(written)};
}

void* kernel_address(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return nullptr;
  auto* const pointer = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  return pointer == nullptr ? nullptr : pointer + card(tensor.device().index()).kernel_offset;
}

using Ranges = c10::SmallVector<bpsim_range, 8>;

// State that is needed only while a call is assembled.
struct Scratch {
  Ranges ranges;
  double bytes = 0;  // read and written, for the model

  void touch(const at::Tensor& tensor, bool written) {
    if (tensor.numel() == 0) return;
    ranges.push_back(range_of(tensor, written));
    bytes += bytes_in(tensor);
  }

  c10::SmallVector<const c10::TensorImpl*, 8> identities;  // compared, never dereferenced
  c10::SmallVector<at::Tensor, 1> moved;  // must live until the launch that reads them is queued
};

// One queued call of an operator. It holds no reference to device memory: the driver allocates memory in stream order,
// so memory freed after this call was queued is not reused before the call has run.
class Call {
 public:
  Call(const Plan& plan, Stack& stack, c10::DeviceIndex card, Scratch& scratch) : plan_(plan), card_(card) {
    const size_t count = plan.arguments.size(), first = stack.size() - count;
    arguments_.reserve(count);
    for (size_t i = 0; i < count; ++i) take(i, stack[first + i], scratch);
  }

  void add_result(const at::Tensor& tensor, Scratch& scratch) {
    results_.push_back(view_of(tensor, 0, kWhole));
    scratch.touch(tensor, true);
  }

  // Sets where the results of an operator that waits go; other results are allocated by `add_result`.
  void keep_results(std::shared_ptr<Stack> kept) { kept_ = std::move(kept); }

  void run() const {
    Stack stack(arguments_.begin(), arguments_.end());
    for (const uint16_t list : lists_) {  // a graph runs the call again, so its own lists stay empty
      if (plan_.arguments[list].kind == Plan::Kind::tensors) stack[list] = stack[list].toTensorList().copy();
      else stack[list] = stack[list].toOptionalTensorList().copy();
    }
    c10::SmallVector<at::Tensor, 6> tensors;
    for (const View& view : views_) {
      tensors.push_back(view.same >= 0 ? tensors[view.same] : materialize(view));
      c10::IValue& argument = stack[view.argument];
      if (view.element == kWhole) argument = tensors.back();
      else if (plan_.arguments[view.argument].kind == Plan::Kind::tensors)
        argument.toTensorList().set(view.element, tensors.back());
      else
        argument.toOptionalTensorList().set(view.element, tensors.back());
    }
    tensors.clear();
    if (plan_.details != nullptr && bpsim_launch_is_watched() != 0) report_detail(plan_.details(stack));
    Placement placement;
    for (const View& result : results_) placement.offer(result.data, bytes_of(result));
    plan_.op.callBoxed(&stack);
    placement.close();
    if (kept_ != nullptr) {
      *kept_ = std::move(stack);
      return;
    }
    if (!results_.empty()) settle_results(stack);
    stack.clear();
    TORCH_CHECK(placement.held() == 0, plan_.name, " keeps memory of the card after its launch has ended");
  }

 private:
  static constexpr int kWhole = -1;

  struct View {
    void* data;       // as kernels see it; null: a scalar of the host, stored in scalars_
    uint32_t dims;    // index of sizes and strides in numbers_
    uint16_t rank;
    uint16_t argument;
    int16_t element;  // index in a list, or kWhole
    int16_t same;     // index of an earlier view of the same tensor, or -1
    at::ScalarType type;
    bool wrapped;     // a Python number
    uint8_t scalar;   // index in scalars_ plus one, or 0
  };
  struct alignas(16) Value {
    char bytes[16];
  };

  void take(size_t index, c10::IValue& value, Scratch& scratch) {
    const Plan::Argument& argument = plan_.arguments[index];
    switch (argument.kind) {
      case Plan::Kind::tensor:
        arguments_.emplace_back();
        if (value.isTensor() && value.toTensor().defined()) take_tensor(value.toTensor(), index, kWhole, scratch);
        break;
      case Plan::Kind::tensors: {
        const c10::List<at::Tensor> given = value.toTensorList();
        c10::List<at::Tensor> list;
        list.resize(given.size());
        arguments_.emplace_back(std::move(list));
        lists_.push_back(static_cast<uint16_t>(index));
        for (size_t i = 0; i < given.size(); ++i) take_tensor(given.get(i), index, static_cast<int>(i), scratch);
        break;
      }
      case Plan::Kind::optional_tensors: {
        const auto given = value.toOptionalTensorList();
        c10::List<std::optional<at::Tensor>> list;
        list.resize(given.size());
        arguments_.emplace_back(std::move(list));
        lists_.push_back(static_cast<uint16_t>(index));
        for (size_t i = 0; i < given.size(); ++i) {
          const std::optional<at::Tensor> one = given.get(i);
          if (one.has_value() && one->defined()) take_tensor(*one, index, static_cast<int>(i), scratch);
        }
        break;
      }
      case Plan::Kind::generator:
        arguments_.emplace_back(numbers_for_launch(value.toOptional<at::Generator>(), card_));
        break;
      case Plan::Kind::device:
        arguments_.emplace_back(c10::Device(c10::DeviceType::CPU));
        break;
      case Plan::Kind::other:
        arguments_.push_back(std::move(value));
    }
  }

  void take_tensor(const at::Tensor& given, size_t argument, int element, Scratch& scratch) {
    const at::Tensor* tensor = &given;
    at::Tensor moved;
    if (C10_UNLIKELY(given.device().type() != kType)) {
      if (given.device().is_cpu() && given.dim() == 0) return take_scalar(given, argument, element, scratch);
      TORCH_CHECK(plan_.host_indices && given.device().is_cpu(), plan_.name,
                  ": Expected all tensors to be on the same device, but found at least two devices, bpnpu:",
                  static_cast<int>(card_), " and ", given.device(), "!");
      moved = given.to(c10::Device(kType, card_));
      scratch.moved.push_back(moved);
      tensor = &moved;
    }
    const c10::TensorImpl* const identity = moved.defined() ? nullptr : tensor->unsafeGetTensorImpl();
    View view = view_of(*tensor, argument, element);
    for (size_t i = 0; i < scratch.identities.size() && identity != nullptr; ++i)
      if (scratch.identities[i] == identity) view.same = static_cast<int16_t>(i);
    scratch.identities.push_back(identity);
    views_.push_back(view);
    scratch.touch(*tensor, plan_.arguments[argument].written);
  }

  void take_scalar(const at::Tensor& tensor, size_t argument, int element, Scratch& scratch) {
    View view = view_of(tensor, argument, element);
    Value value;
    std::memcpy(value.bytes, tensor.const_data_ptr(), tensor.itemsize());
    scalars_.push_back(value);
    view.scalar = static_cast<uint8_t>(scalars_.size());
    view.wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    scratch.identities.push_back(nullptr);
    views_.push_back(view);
  }

  View view_of(const at::Tensor& tensor, size_t argument, int element) {
    View view{};
    view.data = tensor.device().type() == kType ? kernel_address(tensor) : nullptr;
    view.dims = static_cast<uint32_t>(numbers_.size());
    view.rank = static_cast<uint16_t>(tensor.dim());
    view.argument = static_cast<uint16_t>(argument);
    view.element = static_cast<int16_t>(element);
    view.same = -1;
    view.type = tensor.scalar_type();
    numbers_.append(tensor.sizes().begin(), tensor.sizes().end());
    numbers_.append(tensor.strides().begin(), tensor.strides().end());
    return view;
  }

  void report_detail(const Plan::Detail& detail) const {
    bpsim_range output{};
    if (detail.output.defined()) {
      output = range_of(detail.output, true);
      output.pointer = static_cast<const char*>(output.pointer) - card(card_).kernel_offset;
    }
    check(bpsim_launch_detail(detail.bytes, detail.flops, detail.output.defined() ? &output : nullptr),
          plan_.name.c_str());
  }

  size_t bytes_of(const View& view) const {
    const int64_t* const dims = numbers_.data() + view.dims;
    return at::detail::computeStorageNbytes({dims, view.rank}, {dims + view.rank, view.rank},
                                            c10::elementSize(view.type));
  }

  at::Tensor materialize(const View& view) const {
    void* const data = view.scalar == 0 ? view.data : const_cast<char*>(scalars_[view.scalar - 1].bytes);
    at::Tensor made = host_tensor(data, numbers_.data() + view.dims, view.rank, view.type);
    if (view.wrapped) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

  // Copies results that the kernel did not write in place to where they belong. A result may occupy the memory of
  // another one, so all displaced results are cloned first.
  void settle_results(Stack& stack) const {
    c10::SmallVector<std::pair<const View*, at::Tensor>, 2> displaced;
    size_t next = 0;
    for (size_t i = 0; i < plan_.results.size(); ++i) {
      if (plan_.results[i] != Plan::kNew) continue;
      const View& place = results_[next++];
      const at::Tensor& result = stack[i].toTensor();
      const int64_t* const dims = numbers_.data() + place.dims;
      const c10::IntArrayRef sizes(dims, place.rank), strides(dims + place.rank, place.rank);
      TORCH_CHECK(result.sizes() == sizes && result.scalar_type() == place.type, plan_.name, " returned ",
                  result.scalar_type(), result.sizes(), ", but its shape function announced ", place.type, sizes);
      if (result.numel() == 0) continue;
      const bool there = result.const_data_ptr() == place.data && result.strides() == strides;
      if (!there) displaced.emplace_back(&place, result.clone());
    }
    stack.clear();
    for (auto& [place, result] : displaced) materialize(*place).copy_(result);
  }

  const Plan& plan_;
  c10::DeviceIndex card_;
  c10::SmallVector<c10::IValue, 10> arguments_;
  c10::SmallVector<View, 5> views_;
  c10::SmallVector<View, 2> results_;
  c10::SmallVector<int64_t, 40> numbers_;
  c10::SmallVector<Value, 1> scalars_;
  c10::SmallVector<uint16_t, 1> lists_;
  std::shared_ptr<Stack> kept_;
};

// Runs on the worker thread; an exception becomes the error text of the card's failure.
template <class T>
int guarded(void* arg, char* error, size_t error_bytes) {
  const auto failed = [&](const char* text) {
    std::strncpy(error, text, error_bytes - 1);
    error[error_bytes - 1] = '\0';
    return 1;
  };
  try {
    follow_thread_count();
    static_cast<T*>(arg)->run();
    return 0;
  } catch (const c10::Error& fault) {
    return failed(fault.what_without_backtrace());
  } catch (const std::exception& fault) {
    return failed(fault.what());
  }
}

template <class T>
void destroy(void* arg) {
  delete static_cast<T*>(arg);
}

template <class T>
void submit(const char* name, c10::DeviceIndex card, std::unique_ptr<T> work, const Scratch& scratch, double flops) {
  bpsim_launch launch{};
  launch.name = name;
  launch.function = &guarded<T>;
  launch.destroy = &destroy<T>;
  launch.ranges = scratch.ranges.data();
  launch.range_count = static_cast<uint32_t>(scratch.ranges.size());
  launch.bytes = scratch.bytes;
  launch.flops = flops;
  launch.arg = work.release();
  check(bpsim_enqueue(current_stream_of(card), &launch), name);
}

// An `out` tensor without a Python object was made by PyTorch for this call and has the right size, except those that
// PyTorch makes empty for the kernel to resize. An `out` that is also an input keeps its size by the operator's rules.
bool has_its_size(const at::Tensor& out, Arguments arguments, size_t own) {
  if (out.dim() == 1 && out.numel() == 0) return false;
  if (out.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr) return true;
  for (size_t i = 0; i < own; ++i)
    if (arguments[i].isTensor() && arguments[i].toTensor().is_same(out)) return true;
  return false;
}

void size_outs(const Plan& plan, Arguments arguments, c10::DeviceIndex card) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (plan.arguments[i].out && !has_its_size(arguments[i].toTensor(), arguments, i)) {
      plan.sizes(plan, arguments, card);
      return;
    }
  }
}

void launch_and_wait(const Plan& plan, Stack* stack, c10::DeviceIndex card) {
  const size_t count = plan.arguments.size();
  Scratch scratch;
  auto call = std::make_unique<Call>(plan, *stack, card, scratch);
  auto kept = std::make_shared<Stack>();
  call->keep_results(kept);
  torch::jit::drop(*stack, count);
  submit(plan.name.c_str(), card, std::move(call), scratch, 0);
  check(bpsim_stream_synchronize(current_stream_of(card)), plan.name.c_str());
  for (c10::IValue& value : *kept) {
    if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& result = value.toTensor();
      at::Tensor made = new_tensor(card, result.sizes(), result.scalar_type());
      made.copy_(result);
      stack->emplace_back(std::move(made));
    } else {
      stack->push_back(std::move(value));
    }
  }
}

}  // namespace

void launch(const Plan& plan, Stack* stack) {
  plan.launched.fetch_add(1, std::memory_order_relaxed);
  const size_t count = plan.arguments.size();
  const Arguments arguments = torch::jit::last(*stack, count);
  const c10::DeviceIndex card = card_of(plan, arguments);
  if (plan.waits) return launch_and_wait(plan, stack, card);
  if (plan.has_out) size_outs(plan, arguments, card);
  Results made;
  if (plan.makes_new) plan.shapes(plan, arguments, card, made);
  const double flops = plan.flops == nullptr ? 0 : plan.flops(arguments);
  c10::SmallVector<c10::IValue, 2> returned;
  size_t next = 0;
  for (const int from : plan.results) {
    if (from == Plan::kNew) returned.emplace_back(made[next++]);
    else returned.push_back(arguments[from]);
  }
  Scratch scratch;
  auto call = std::make_unique<Call>(plan, *stack, card, scratch);
  for (const at::Tensor& result : made) call->add_result(result, scratch);
  torch::jit::drop(*stack, count);
  submit(plan.name.c_str(), card, std::move(call), scratch, flops);
  for (c10::IValue& value : returned) stack->push_back(std::move(value));
}

HostView::HostView(const at::Tensor& tensor)
    : data(kernel_address(tensor)),
      dims(tensor.sizes().begin(), tensor.sizes().end()),
      type(tensor.scalar_type()) {
  dims.append(tensor.strides().begin(), tensor.strides().end());
}

at::Tensor HostView::tensor() const {
  return host_tensor(data, dims.data(), dims.size() / 2, type);
}

void enqueue(const char* name, c10::DeviceIndex card, c10::ArrayRef<Touched> touched, Work work) {
  struct Closure {
    Work work;
    void run() const { work(); }
  };
  Scratch scratch;
  for (const Touched& one : touched) scratch.touch(one.tensor, one.written);
  submit(name, card, std::make_unique<Closure>(Closure{std::move(work)}), scratch, 0);
}

}  // namespace backplane::sim
