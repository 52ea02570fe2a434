// Determines whether an operator can be part of a graph, and how it is recorded.

#include <ATen/core/enum_tag.h>

#include "graph.h"

namespace backplane::cpu {
namespace {

bool holds_tensors(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return true;
    case c10::TypeKind::ListType: return holds_tensors(type->expectRef<c10::ListType>().getElementType());
    case c10::TypeKind::OptionalType: return holds_tensors(type->expectRef<c10::OptionalType>().getElementType());
    default: return false;
  }
}

std::string refusal(const c10::OperatorHandle& op, const std::string& name) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return "draws random numbers";
  if (name == "aten::resolve_conj" || name == "aten::resolve_neg") return "lets Python read a tensor's values";
  for (const c10::Argument& result : op.schema().returns())
    if (!holds_tensors(result.type())) return "returns a value to the host (" + result.type()->str() + ")";
  // With integer indices `index` is a gather; the recorder checks for a mask.
  if (op.hasTag(at::Tag::dynamic_output_shape) && name != "aten::index.Tensor")
    return "has results whose shape depends on values";
  if (op.hasTag(at::Tag::data_dependent_output)) return "depends on values";
  if (op.hasTag(at::Tag::inplace_view) && name != "aten::detach_") return "changes the shape of a tensor in place";
  return "";
}

}  // namespace

GraphOperator::GraphOperator(const c10::OperatorHandle& handle) : op(handle), name(toString(handle.operator_name())) {
  const c10::FunctionSchema& schema = op.schema();
  for (const c10::Argument& argument : schema.arguments()) {
    written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    writes |= written.back();
  }
  if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    kernel = op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    // PyTorch stores where a kernel was registered: for Python functions, a Python file and line.
    in_python = kernel->debug().find(".py:") != std::string::npos;
  }
  allocates = name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
  refused = refusal(op, name);
  if (refused.empty() && !kernel.has_value()) refused = "has no kernel for CPU tensors";
}

}  // namespace backplane::cpu
