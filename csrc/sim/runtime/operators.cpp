// Registers PyTorch's operators for the card.
//
// Structured operators (most arithmetic) reach the device as their `out` variant: PyTorch computes the shape of the
// result, allocates it on the card, and calls that variant. So the lists below hold `out` and in-place variants, and
// those functional operators that have their own kernel. An operator that is not listed runs on the host
// (fallback.cpp).

#include <torch/library.h>

#include <cstring>

#include "runtime/counters.h"
#include "runtime/launch.h"
#include "runtime/launch_detail.h"
#include "runtime/shapes.h"

namespace backplane::sim {
namespace {

// All `out` variants of these that have a CPU kernel.
constexpr const char* kOut[] = {
    // elementwise arithmetic
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "clamp",
    "clamp_max", "clamp_min", "copysign", "cos", "cosh", "div", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
    "floor", "floor_divide", "fmax", "fmin", "fmod", "frac", "ge", "gt", "isneginf", "isposinf", "le", "lerp", "log",
    "log10", "log1p", "log2", "logaddexp", "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor",
    "lt", "maximum", "minimum", "mul", "nan_to_num", "ne", "neg", "pow", "reciprocal", "remainder", "round", "rsqrt",
    "sgn", "sign", "signbit", "sin", "sinc", "sinh", "sqrt", "sub", "tan", "tanh", "trunc", "where", "xlogy",
    // activations
    "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "sigmoid", "silu",
    "softplus", "softshrink", "threshold", "_softmax", "_log_softmax",
    // reductions and scans
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "cumprod", "cumsum", "kthvalue", "linalg_vector_norm",
    "max", "mean", "median", "min", "nansum", "norm", "prod", "std", "sum", "var", "_logcumsumexp", "_cummax_helper",
    "_cummin_helper",
    // matrix products
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "mm", "_addmm_activation", "_int_mm",
    // sorting, indexing, joining
    "arange", "bernoulli", "bucketize", "cat", "eye", "gather", "index", "index_add", "index_copy", "index_reduce",
    "index_select", "isin", "linspace", "multinomial", "nonzero_static", "normal", "randperm", "scatter", "scatter_add",
    "scatter_reduce", "searchsorted", "sort", "take", "topk", "tril", "triu", "_stack"};

// In-place operators that do not arrive as `out`.
constexpr const char* kInPlace[] = {
    "bernoulli_", "cauchy_", "exponential_", "fill_", "floor_divide_", "geometric_", "hardswish_", "hardtanh_",
    "index_fill_", "log_normal_", "masked_fill_", "masked_scatter_", "normal_", "put_", "random_", "relu_", "uniform_",
    "__ilshift__", "__irshift__", "_index_put_impl_"};

struct Functional {
  const char* name;
  Plan::Shapes shapes;
};

// Functional operators with their own kernel, and the shape functions of their results. PyTorch's own shape functions
// for these are Python, so the frequent ones have a C++ function here.
constexpr Functional kFunctional[] = {
    {"where.self", &shapes_of_where},
    {"index_select", &shapes_of_index_select},
    {"isnan", &shapes_as_bool},
    {"relu", &shapes_as_first},
    {"hardswish", &shapes_as_first},
    {"hardtanh", &shapes_as_first},
    {"_logcumsumexp", &shapes_as_first},
    {"flip", &shapes_as_first},
    {"roll", &shapes_as_first},
    {"max", &shapes_of_one},
    {"min", &shapes_of_one},
    {"floor_divide", &shapes_of_binary},
    {"remainder.Scalar_Tensor", &shapes_by_meta},
    {"rsub.Tensor", &shapes_of_binary},
    {"native_layer_norm", &shapes_of_layer_norm},
    {"native_group_norm", &shapes_by_meta},
    {"prod", &shapes_by_meta},
    {"nansum", &shapes_by_meta},
    {"std.correction", &shapes_by_meta},
    {"var.correction", &shapes_by_meta},
    {"std_mean.correction", &shapes_by_meta},
    {"var_mean.correction", &shapes_by_meta},
    {"count_nonzero.dim_IntList", &shapes_by_meta},
    {"bucketize.Tensor", &shapes_by_meta},
    {"bucketize.Scalar", &shapes_by_meta},
    {"searchsorted.Tensor", &shapes_by_meta},
    {"searchsorted.Scalar", &shapes_by_meta},
    {"multinomial", &shapes_by_meta},
    {"median", &shapes_of_one},
    {"dot", &shapes_of_one},
    {"vdot", &shapes_of_one},
    {"take", &shapes_by_meta},
    {"trace", &shapes_by_meta},
    {"_int_mm", &shapes_by_meta},
    {"nonzero_static", &shapes_by_meta},
    {"__lshift__.Scalar", &shapes_by_meta},
    {"__lshift__.Tensor", &shapes_by_meta},
    {"__rshift__.Scalar", &shapes_by_meta},
    {"__rshift__.Tensor", &shapes_by_meta},
};

// The result, or its size, depends on data on the card, so the host waits.
constexpr const char* kWaiting[] = {"nonzero",  "masked_select",      "bincount",
                                    "equal",    "_unique2",           "unique_dim",
                                    "unique_consecutive", "unique_dim_consecutive", "repeat_interleave.Tensor"};

// Indices may be on the host, as everywhere in PyTorch.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index.Tensor_out" || name == "aten::_index_put_impl_";
}

Plan::Sizes sizes_of(const std::string& name) {
  static constexpr const char* kBroadcast[] = {"aten::logical_and.out", "aten::logical_or.out", "aten::logical_xor.out",
                                               "aten::logical_not.out", "aten::nan_to_num.out"};
  for (const char* one : kBroadcast)
    if (name == one) return &sizes_by_broadcast;
  return name == "aten::arange.start_out" ? &sizes_of_arange : &sizes_by_meta;
}

Plan::Flops flops_of(const std::string& name) {
  if (name == "aten::mm.out" || name == "aten::bmm.out") return &flops_of_product<0>;
  if (name == "aten::addmm.out" || name == "aten::baddbmm.out") return &flops_of_product<1>;
  return nullptr;
}

// Fills a tensor on another device with a number on the card: the host waits for the number, as with any device.
class Filler final : public c10::OperatorKernel {
 public:
  explicit Filler(std::shared_ptr<const Plan> plan) : plan_(std::move(plan)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    at::Tensor self = torch::jit::peek(*stack, 0, 2).toTensor();
    const at::Tensor value = torch::jit::peek(*stack, 1, 2).toTensor();
    if (value.dim() != 0 || value.device().type() != kType || self.device() == value.device())
      return launch(*plan_, stack);
    self.fill_(value.item());
    torch::jit::drop(*stack, 2);
    stack->emplace_back(std::move(self));
  }

 private:
  std::shared_ptr<const Plan> plan_;
};

bool among(const std::string& name, c10::ArrayRef<const char*> names) {
  for (const char* one : names)
    if (name == one) return true;
  return false;
}

void add(torch::Library& library, const c10::OperatorHandle& op, Plan::Shapes shapes, bool waits) {
  auto plan = std::make_shared<Plan>(op);
  if (shapes != nullptr) plan->shapes = shapes;
  plan->waits = waits;
  plan->host_indices = takes_host_indices(plan->name);
  plan->flops = flops_of(plan->name);
  plan->details = details_of(plan->name);
  if (plan->has_out) plan->sizes = sizes_of(plan->name);
  remember(plan);
  if (plan->name == "aten::fill_.Tensor")
    library.impl(plan->name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Filler>(plan)));
  else
    library.impl(plan->name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Launcher>(plan)));
}

}  // namespace
}  // namespace backplane::sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using namespace backplane::sim;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.compare(0, 6, "aten::") != 0) continue;
    const std::string base = name.name.substr(6);
    const bool in_place = among(base, kInPlace);
    if (!in_place && !among(base, kOut)) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const auto& arguments = op->schema().arguments();
    const bool out = !arguments.empty() && arguments.back().is_out();
    const bool helper = base == "_cummax_helper" || base == "_cummin_helper";
    if (in_place || out || helper) add(library, *op, nullptr, false);
  }
  for (const Functional& one : kFunctional) {
    const char* const dot = std::strchr(one.name, '.');
    const std::string base(one.name, dot == nullptr ? std::strlen(one.name) : dot - one.name);
    add(library, dispatcher.findSchemaOrThrow(("aten::" + base).c_str(), dot == nullptr ? "" : dot + 1), one.shapes,
        false);
  }
  for (const char* name : kWaiting) {
    const char* const dot = std::strchr(name, '.');
    const std::string base(name, dot == nullptr ? std::strlen(name) : dot - name);
    add(library, dispatcher.findSchemaOrThrow(("aten::" + base).c_str(), dot == nullptr ? "" : dot + 1), nullptr, true);
  }
}
