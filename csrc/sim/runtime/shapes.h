// Declares the shapes and types of results, for operators whose own shape functions are missing or slow.
#pragma once

#include "runtime/plan.h"

namespace backplane::sim {

// Like the first tensor: the same strides if it is dense, else contiguous.
void shapes_as_first(const Plan&, Arguments, c10::DeviceIndex, Results&);
void shapes_as_bool(const Plan&, Arguments, c10::DeviceIndex, Results&);
// One number of the first tensor's type.
void shapes_of_one(const Plan&, Arguments, c10::DeviceIndex, Results&);
// Two arguments that are broadcast and type-promoted.
void shapes_of_binary(const Plan&, Arguments, c10::DeviceIndex, Results&);
void shapes_of_where(const Plan&, Arguments, c10::DeviceIndex, Results&);
void shapes_of_index_select(const Plan&, Arguments, c10::DeviceIndex, Results&);
void shapes_of_layer_norm(const Plan&, Arguments, c10::DeviceIndex, Results&);

void sizes_by_broadcast(const Plan&, Arguments, c10::DeviceIndex);
void sizes_of_arange(const Plan&, Arguments, c10::DeviceIndex);

// Returns the FLOP of a (batched) matrix product whose factors are arguments `First` and `First + 1`.
template <int First>
double flops_of_product(Arguments arguments) {
  const at::Tensor& a = arguments[First].toTensor();
  const at::Tensor& b = arguments[First + 1].toTensor();
  return 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
}

}  // namespace backplane::sim
