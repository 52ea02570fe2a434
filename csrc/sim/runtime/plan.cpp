// Derives the launch plan of an operator from its schema, finds the card of a call, and computes shapes by meta
// kernels.

#include "runtime/plan.h"

#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>

#include "runtime/memory.h"

namespace backplane::sim {
namespace {

Plan::Kind kind_of(const c10::Argument& argument) {
  using Kind = Plan::Kind;
  const c10::TypePtr& whole = argument.type();
  const c10::TypePtr inner = whole->kind() == c10::TypeKind::OptionalType
                                 ? whole->expectRef<c10::OptionalType>().getElementType()
                                 : whole;
  switch (inner->kind()) {
    case c10::TypeKind::TensorType:
      return Kind::tensor;
    case c10::TypeKind::GeneratorType:
      return Kind::generator;
    case c10::TypeKind::DeviceObjType:
      return Kind::device;
    case c10::TypeKind::ListType: {
      const c10::TypePtr& element = inner->expectRef<c10::ListType>().getElementType();
      if (element->kind() == c10::TypeKind::TensorType) return Kind::tensors;
      if (element->kind() == c10::TypeKind::OptionalType &&
          element->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::TensorType)
        return Kind::optional_tensors;
      return Kind::other;
    }
    default:
      return Kind::other;
  }
}

[[noreturn]] void mixed(const Plan& plan, c10::Device one, c10::Device other) {
  TORCH_CHECK(false, plan.name, ": Expected all tensors to be on the same device, but found at least two devices, ",
              one, " and ", other, "!");
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (tensor.device().is_cpu() && tensor.dim() == 0) return tensor;  // a scalar, which may be combined with any device
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

torch::jit::Stack as_meta(const Plan& plan, Arguments arguments) {
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    switch (plan.arguments[i].kind) {
      case Plan::Kind::tensor:
        stack.emplace_back(value.isTensor() && value.toTensor().defined() ? c10::IValue(as_meta(value.toTensor()))
                                                                          : value);
        break;
      case Plan::Kind::tensors: {
        c10::List<at::Tensor> list;
        for (const at::Tensor& one : value.toTensorVector()) list.push_back(as_meta(one));
        stack.emplace_back(std::move(list));
        break;
      }
      case Plan::Kind::optional_tensors: {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
          list.push_back(one.has_value() && one->defined() ? std::optional(as_meta(*one)) : std::nullopt);
        stack.emplace_back(std::move(list));
        break;
      }
      case Plan::Kind::generator:
        stack.emplace_back();
        break;
      case Plan::Kind::device:
        stack.emplace_back(c10::Device(c10::kMeta));
        break;
      case Plan::Kind::other:
        stack.push_back(value);
    }
  }
  return stack;
}

}  // namespace

Plan::Plan(const c10::OperatorHandle& handle) : op(handle), name(toString(handle.operator_name())) {
  const c10::FunctionSchema& schema = op.schema();
  for (const c10::Argument& argument : schema.arguments()) {
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const Kind kind = kind_of(argument);
    const bool out = argument.is_out() && kind == Kind::tensor;
    arguments.push_back({kind, written, out});
    has_out |= out;
  }
  for (const c10::Argument& result : schema.returns()) {
    int from = kNew;
    if (const c10::AliasInfo* alias = result.alias_info()) {
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const c10::AliasInfo* other = schema.arguments()[i].alias_info();
        if (other != nullptr && other->beforeSets() == alias->beforeSets()) from = static_cast<int>(i);
      }
    }
    results.push_back(from);
    makes_new |= from == kNew;
  }
  if (makes_new) shapes = &shapes_by_meta;
  if (has_out) sizes = &sizes_by_meta;
}

c10::DeviceIndex card_of(const Plan& plan, Arguments arguments) {
  c10::DeviceIndex found = -1;
  std::optional<c10::Device> elsewhere;  // device of a tensor that is written
  const auto look = [&](const at::Tensor& tensor, bool written = false) {
    if (!tensor.defined()) return;
    const c10::Device device = tensor.device();
    if (device.type() == kType) {
      if (found == -1) found = device.index();
      if (found != device.index()) mixed(plan, c10::Device(kType, found), device);
    } else if (written) {
      elsewhere = device;
    }
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    switch (plan.arguments[i].kind) {
      case Plan::Kind::tensor:
        if (value.isTensor()) look(value.toTensor(), plan.arguments[i].written);
        break;
      case Plan::Kind::tensors:
        for (const auto& one : value.toTensorList()) look(one, plan.arguments[i].written);
        break;
      case Plan::Kind::optional_tensors:
        for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
          if (one.has_value()) look(*one);
        break;
      default:
        break;
    }
  }
  TORCH_CHECK(found != -1, plan.name, " was called for bpnpu, but none of its tensors is on bpnpu");
  // Includes scalars of the host: the launch has a copy, and a write to the copy would be lost.
  if (elsewhere.has_value()) mixed(plan, c10::Device(kType, found), *elsewhere);
  return found;
}

void shapes_by_meta(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  torch::jit::Stack stack = as_meta(plan, arguments);
  plan.op.callBoxed(&stack);
  for (size_t i = 0; i < plan.results.size(); ++i) {
    if (plan.results[i] != Plan::kNew) continue;
    TORCH_CHECK(stack[i].isTensor(), plan.name,
                " returns a value that is not a tensor, which bpnpu cannot allocate before the launch");
    const at::Tensor& meta = stack[i].toTensor();
    results.push_back(new_tensor(card, meta.sizes(), meta.strides(), meta.scalar_type()));
  }
}

void sizes_by_meta(const Plan& plan, Arguments arguments, c10::DeviceIndex) {
  torch::jit::Stack stack = as_meta(plan, arguments);
  torch::jit::Stack called = stack;
  plan.op.callBoxed(&called);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!plan.arguments[i].out) continue;
    const at::Tensor& meta = stack[i].toTensor();
    const at::Tensor& out = arguments[i].toTensor();
    if (at::native::resize_output(out, meta.sizes()) && meta.numel() != 0 && !meta.is_contiguous())
      out.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  }
}

}  // namespace backplane::sim
