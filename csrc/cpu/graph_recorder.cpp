// Captures a graph: the thread's operators run as usual and are recorded.
//
// PyTorch's dispatcher has a key for external libraries that defer the construction of models. No tensor has this key;
// a thread that captures enables it, so every operator passes here first. Operators whose kernel is a Python function
// pass through, and the operators that they call are recorded instead. An operator that cannot be part of a graph is
// remembered and reported at the end of the capture, so that the results of the call are right in any case.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

#include "graph.h"

namespace backplane::cpu {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

// The dispatch keys of plain CPU tensors. Autograd and view keys pass calls on while no gradients are required.
const c10::DispatchKeySet& plain_keys() {
  static const c10::DispatchKeySet keys =
      c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView}) |
      c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return keys;
}

class Recording {
 public:
  Recording() : graph_(std::make_unique<Graph>()), random_(random_state()), allocations_(graph_->pool) {
    c10::impl::tls_set_dispatch_key_included(kKey, true);
  }
  ~Recording() { c10::impl::tls_set_dispatch_key_included(kKey, false); }

  void intercept(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack);

  std::unique_ptr<Graph> finish() {
    c10::impl::tls_set_dispatch_key_included(kKey, false);
    TORCH_CHECK(broken_.empty(), broken_);
    return std::move(graph_);
  }

  static at::Tensor random_state() { return at::detail::getDefaultCPUGenerator().get_state(); }
  const at::Tensor& random_at_begin() const { return random_; }

 private:
  std::shared_ptr<const GraphOperator> known(const c10::OperatorHandle& handle);
  void add_step(std::shared_ptr<const GraphOperator> op, const torch::jit::Stack& arguments,
                const torch::jit::Stack& results, std::vector<GraphAllocation> allocations);
  void check_argument(const GraphOperator& op, const at::Tensor& tensor, bool written);
  bool is_number(const at::Tensor& tensor, GraphBlock* block) const {
    const auto found = numbers_.find(block);
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() || (found != numbers_.end() && found->second == block->taken);
  }
  c10::IValue ready(const GraphOperator& op, const c10::IValue& value);
  at::Tensor ready(const at::Tensor& tensor);
  void refuse(const GraphOperator& op, const std::string& why) {
    if (broken_.empty()) broken_ = op.name + " " + why;
  }

  std::unique_ptr<Graph> graph_;
  at::Tensor random_;
  RecordAllocations allocations_;
  std::unordered_map<c10::OperatorName, std::shared_ptr<const GraphOperator>> operators_;
  std::unordered_map<GraphBlock*, c10::Storage> places_;
  std::unordered_map<GraphBlock*, uint64_t> numbers_;  // made from Python numbers, with the use of the block
  std::string broken_;
};

thread_local std::unique_ptr<Recording> current;

template <class F>
void for_tensors(const c10::IValue& value, F&& use) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& one : value.toTensorVector())
      if (one.defined()) use(one);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) for_tensors(one, use);
  }
}

std::shared_ptr<const GraphOperator> Recording::known(const c10::OperatorHandle& handle) {
  auto& found = operators_[handle.operator_name()];
  if (found == nullptr) found = std::make_shared<GraphOperator>(handle);
  return found;
}

void Recording::intercept(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  const auto op = known(handle);
  if (op->in_python) {
    handle.redispatchBoxed(keys, stack);
    return;
  }
  const size_t count = handle.schema().arguments().size();
  const torch::jit::Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  std::vector<GraphAllocation> allocations;
  {
    c10::impl::ExcludeDispatchKeyGuard unseen(kKey);
    allocations_.list_into(&allocations);
    struct Unlist {
      RecordAllocations& of;
      ~Unlist() { of.list_into(nullptr); }
    } unlist{allocations_};
    handle.redispatchBoxed(keys, stack);
  }
  if (!broken_.empty()) return;
  if ((keys - plain_keys()).highestFunctionalityKey() != c10::DispatchKey::Undefined)
    refuse(*op, "has tensors that are not plain CPU tensors");
  if (!op->refused.empty()) refuse(*op, op->refused);
  const size_t returned = handle.schema().returns().size();
  const torch::jit::Stack results(stack->end() - static_cast<int64_t>(returned), stack->end());
  if (broken_.empty()) add_step(op, arguments, results, std::move(allocations));
}

// Checks that the contents of an argument come from the graph or from before the capture.
void Recording::check_argument(const GraphOperator& op, const at::Tensor& tensor, bool written) {
  if (!tensor.has_storage()) return refuse(op, "has a tensor without memory");
  if (!tensor.device().is_cpu()) return refuse(op, "has a tensor of another device");
  GraphBlock* block = graph_->pool->block_of(tensor.storage().data_ptr());
  if (block == nullptr) return;
  const bool number = is_number(tensor, block);
  if (written && number)
    refuse(op, "writes into a tensor made from a Python number, so a replay would start from another value");
  else if (written) block->written = true;
  else if (!number && !block->written && tensor.numel() != 0)
    refuse(op, "reads a tensor that nothing in the graph has written");
}

void Recording::add_step(std::shared_ptr<const GraphOperator> op, const torch::jit::Stack& arguments,
                     const torch::jit::Stack& results, std::vector<GraphAllocation> allocations) {
  if (op->name == "aten::detach_") return;  // gradients only, and there are none
  if (op->name == "aten::lift_fresh") {
    // A tensor that Python made from values. A single number is a constant of the call, like numbers among the
    // arguments.
    const at::Tensor& made = arguments[0].toTensor();
    GraphBlock* block = graph_->pool->block_of(made.storage().data_ptr());
    if (made.dim() != 0) refuse(*op, "makes a tensor from Python values");
    else if (block != nullptr) numbers_[block] = block->taken;
    return;
  }
  if (op->name == "aten::index.Tensor")
    for_tensors(arguments[1], [&](const at::Tensor& index) {
      if (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte)
        refuse(*op, "has a mask, so its shape depends on values");
    });
  std::unordered_set<const c10::StorageImpl*> given;
  for (const c10::IValue& argument : arguments)
    for_tensors(argument, [&](const at::Tensor& tensor) {
      if (tensor.has_storage()) given.insert(tensor.storage().unsafeGetStorageImpl());
    });
  GraphStep step;
  std::unordered_set<GraphBlock*> kept;
  for (size_t i = 0; i < results.size(); ++i) {
    const bool listed = !results[i].isTensor();
    size_t item = 0;
    for_tensors(results[i], [&](const at::Tensor& tensor) {
      const size_t place = item++;
      if (!tensor.has_storage()) return refuse(*op, "has a result that is not plain memory");
      if (tensor.numel() == 0) return;
      if (given.count(tensor.storage().unsafeGetStorageImpl()) != 0) return;  // a view of an argument, or itself
      GraphBlock* block = graph_->pool->block_of(tensor.storage().data_ptr());
      if (block == nullptr) return refuse(*op, "returns a result in memory of another allocator");
      block->written = !op->allocates;
      kept.insert(block);
      if (!op->allocates) step.results.push_back({i, place, listed, ready(tensor)});
    });
  }
  if (!broken_.empty()) return;
  if (!op->writes && step.results.empty()) {
    ++graph_->views;
    return;
  }
  for (const bool written : {false, true})  // reads first, because the operator's own writes do not count for them
    for (size_t i = 0; i < arguments.size(); ++i)
      if (op->written[i] == written)
        for_tensors(arguments[i], [&](const at::Tensor& tensor) { check_argument(*op, tensor, written); });
  for (GraphAllocation& one : allocations) {
    // Memory that an operator keeps may still be in use when it is called again.
    const bool in_use = one.block->live && one.block->taken == one.taken;
    if (in_use && kept.count(one.block) == 0) one.block = nullptr;
  }
  step.allocations = std::move(allocations);
  for (const c10::IValue& value : arguments) step.arguments.push_back(ready(*op, value));
  step.op = std::move(op);
  if (broken_.empty()) graph_->steps.push_back(std::move(step));
}

c10::IValue Recording::ready(const GraphOperator& op, const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(ready(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorVector()) list.push_back(one.defined() ? ready(one) : one);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      list.push_back(one.has_value() && one->defined() ? std::optional<at::Tensor>(ready(*one)) : std::nullopt);
    return list;
  }
  bool hidden = value.isTuple() || value.isGenericDict();
  for_tensors(value, [&](const at::Tensor&) { hidden = true; });
  if (hidden) refuse(op, "has tensors inside an argument of an unsupported type");
  return value;
}

// A tensor from before the capture is kept as it is. One of the graph does not hold its memory, so that others can use
// the memory once the original call would have freed it.
at::Tensor Recording::ready(const at::Tensor& tensor) {
  GraphBlock* block = tensor.has_storage() ? graph_->pool->block_of(tensor.storage().data_ptr()) : nullptr;
  if (block == nullptr) return tensor;
  c10::Storage storage;
  if (is_number(tensor, block)) {  // the same at every replay
    c10::DataPtr own = host_allocator()->allocate(block->capacity);
    std::memcpy(own.get(), block->data, block->capacity);
    storage = c10::Storage(c10::Storage::use_byte_size_t(), block->capacity, std::move(own), nullptr, false);
  } else {
    const auto [found, is_new] = places_.try_emplace(block);
    if (is_new)
      found->second = c10::Storage(c10::Storage::use_byte_size_t(), block->capacity,
                                   c10::DataPtr(block->data, c10::Device(c10::kCPU)), nullptr, false);
    storage = found->second;
  }
  c10::InferenceMode as_in_replays(true);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* made = result.unsafeGetTensorImpl();
  made->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
  return result;
}

void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  TORCH_INTERNAL_ASSERT(current != nullptr, "an operator reached the recorder on a thread that captures no graph");
  current->intercept(op, keys, stack);
}

}  // namespace

void begin_graph() {
  TORCH_CHECK(current == nullptr, "this thread is already capturing another graph; end that capture first");
  TORCH_CHECK(!c10::GradMode::is_enabled(), "a graph cannot record gradients; capture under torch.inference_mode()");
  TORCH_CHECK(!at::autocast::is_autocast_enabled(at::kCPU),
              "autocast is enabled, but a graph has one type per tensor; capture without autocast");
  TORCH_CHECK(!c10::impl::tls_is_dispatch_key_included(kKey), "another library uses the dispatch key of the recorder");
  install_graph_allocator();
  current = std::make_unique<Recording>();
}

std::unique_ptr<Graph> end_graph() {
  TORCH_CHECK(current != nullptr, "this thread is not capturing a graph");
  const at::Tensor before = current->random_at_begin();
  std::unique_ptr<Recording> recording = std::move(current);
  std::unique_ptr<Graph> graph = recording->finish();
  recording.reset();  // from here on, tensors use the host's allocator again
  TORCH_CHECK(Recording::random_state().equal(before), "the call drew random numbers, which a replay would repeat");
  return graph;
}

void abandon_graph() { current.reset(); }

}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&backplane::cpu::record>());
}
