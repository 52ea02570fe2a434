// Implements shape functions in C++, for operators whose own ones are missing or slow.

#include "runtime/shapes.h"

#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/result_type.h>

#include <cmath>

#include "runtime/memory.h"

namespace backplane::sim {
namespace {

using Sizes = c10::SmallVector<int64_t, 6>;

at::Tensor like(const at::Tensor& tensor, at::ScalarType type, c10::DeviceIndex card) {
  const bool strided = tensor.is_non_overlapping_and_dense() && !tensor.is_contiguous();
  return strided ? new_tensor(card, tensor.sizes(), tensor.strides(), type) : new_tensor(card, tensor.sizes(), type);
}

std::vector<int64_t> broadcast(Arguments arguments, size_t count) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < count; ++i)
    if (arguments[i].isTensor()) sizes = at::infer_size(sizes, arguments[i].toTensor().sizes());
  return sizes;
}

}  // namespace

void shapes_as_first(const Plan&, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor& first = arguments[0].toTensor();
  results.push_back(like(first, first.scalar_type(), card));
}

void shapes_as_bool(const Plan&, Arguments arguments, c10::DeviceIndex card, Results& results) {
  results.push_back(like(arguments[0].toTensor(), at::kBool, card));
}

void shapes_of_one(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor& first = arguments[0].toTensor();
  TORCH_CHECK(first.numel() != 0, plan.name, ": Expected reduction dim to be specified for input.numel() == 0");
  results.push_back(new_tensor(card, {}, first.scalar_type()));
}

void shapes_of_binary(const Plan&, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::ScalarType type = at::result_type(arguments[0].toTensor(), arguments[1].toTensor());
  results.push_back(new_tensor(card, broadcast(arguments, 2), type));
}

void shapes_of_where(const Plan&, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::ScalarType type = at::result_type(arguments[1].toTensor(), arguments[2].toTensor());
  results.push_back(new_tensor(card, broadcast(arguments, 3), type));
}

void shapes_of_index_select(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor& self = arguments[0].toTensor();
  const at::Tensor& index = arguments[2].toTensor();
  TORCH_CHECK(index.dim() <= 1, plan.name, ": Index is supposed to be a vector");
  TORCH_CHECK_INDEX(index.scalar_type() == at::kLong || index.scalar_type() == at::kInt, plan.name,
                    ": Expected dtype int32 or int64 for index");
  Sizes sizes(self.sizes().begin(), self.sizes().end());
  if (!sizes.empty()) sizes[at::maybe_wrap_dim(arguments[1].toInt(), self.dim())] = index.numel();
  results.push_back(new_tensor(card, sizes, self.scalar_type()));
}

void shapes_of_layer_norm(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor& input = arguments[0].toTensor();
  const int64_t normalized = static_cast<int64_t>(arguments[1].toDimVector().size());
  TORCH_CHECK(normalized >= 1 && normalized <= input.dim(), plan.name, ": the normalized shape does not fit ",
              input.sizes());
  Sizes statistics(input.sizes().begin(), input.sizes().end());
  for (int64_t i = input.dim() - normalized; i < input.dim(); ++i) statistics[i] = 1;
  // With mixed types, statistics have the type of the weight.
  const bool mixed = arguments[2].isTensor() && arguments[2].toTensor().scalar_type() != input.scalar_type();
  const at::ScalarType type = mixed ? arguments[2].toTensor().scalar_type() : input.scalar_type();
  results.push_back(new_tensor(card, input.sizes(), input.scalar_type()));
  results.push_back(new_tensor(card, statistics, type));
  results.push_back(new_tensor(card, statistics, type));
}

void sizes_by_broadcast(const Plan& plan, Arguments arguments, c10::DeviceIndex) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!plan.arguments[i].out) continue;
    at::native::resize_output(arguments[i].toTensor(), broadcast(arguments, i));
    return;
  }
}

void sizes_of_arange(const Plan& plan, Arguments arguments, c10::DeviceIndex card) {
  const at::Scalar start = arguments[0].toScalar(), end = arguments[1].toScalar(), step = arguments[2].toScalar();
  const at::Tensor& out = arguments[3].toTensor();
  const bool whole = start.isIntegral(true) && end.isIntegral(true) && step.isIntegral(true);
  if (!whole || step.to<int64_t>() == 0) return sizes_by_meta(plan, arguments, card);
  const int64_t first = start.to<int64_t>(), last = end.to<int64_t>(), by = step.to<int64_t>();
  TORCH_CHECK((by > 0 && last >= first) || (by < 0 && last <= first),
              "upper bound and lower bound inconsistent with step sign");
  const int64_t count = (last - first + by - (by > 0 ? 1 : -1)) / by;
  if (out.numel() != count) out.resize_({count});
}

}  // namespace backplane::sim
