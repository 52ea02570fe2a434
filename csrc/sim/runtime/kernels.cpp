// Registers the operators of the namespace `backplane` for the card: their C++ kernels for the CPU, as launches.

#include <torch/library.h>

#include <cstring>

#include "runtime/control.h"
#include "runtime/counters.h"
#include "runtime/launch.h"
#include "runtime/launch_detail.h"
#include "runtime/memory.h"
#include "runtime/shapes.h"

namespace backplane::sim {
namespace {

void shapes_contiguous(const Plan&, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor& x = arguments[0].toTensor();
  results.push_back(new_tensor(card, x.sizes(), x.scalar_type()));
}

void shapes_as_two(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  shapes_as_first(plan, arguments, card, results);
  shapes_as_first(plan, arguments, card, results);
}

void shapes_of_half(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor& x = arguments[0].toTensor();
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) % 2 == 0, plan.name, ": the last dimension must be even, got shape ",
              x.sizes());
  c10::SmallVector<int64_t, 6> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() /= 2;
  results.push_back(new_tensor(card, sizes, x.scalar_type()));
}

void shapes_of_linear(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor& x = arguments[0].toTensor();
  const at::Tensor& weight = arguments[1].toTensor();
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), plan.name, ": input of shape ",
              x.sizes(), " does not fit a weight of shape ", weight.sizes());
  c10::SmallVector<int64_t, 6> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = weight.size(0);
  results.push_back(new_tensor(card, sizes, x.scalar_type()));
}

double flops_of_linear(Arguments arguments) {
  const at::Tensor& weight = arguments[1].toTensor();
  return 2.0 * static_cast<double>(arguments[0].toTensor().numel()) * static_cast<double>(weight.size(0));
}

// For padded weights: an argument gives the number of output features.
void new_with_features(const at::Tensor& x, int64_t features, c10::DeviceIndex card, Results& results) {
  c10::SmallVector<int64_t, 6> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = features;
  results.push_back(new_tensor(card, sizes, x.scalar_type()));
}

template <int Features>
double flops_with_features(Arguments arguments) {
  return 2.0 * static_cast<double>(arguments[0].toTensor().numel()) * static_cast<double>(arguments[Features].toInt());
}

// x, blocks, out_features, bias
void shapes_of_blocked_linear(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor &x = arguments[0].toTensor(), &blocks = arguments[1].toTensor();
  const int64_t features = arguments[2].toInt();
  TORCH_CHECK(x.dim() >= 1 && blocks.dim() >= 2 && x.size(-1) == blocks.size(-1) && features >= 0 &&
                  features * x.size(-1) <= blocks.numel(),
              plan.name, ": input of shape ", x.sizes(), " does not fit blocks of shape ", blocks.sizes(), " with ",
              features, " output features");
  new_with_features(x, features, card, results);
}

// x, codes, scales, offsets, bits, out_features, bias
void shapes_of_quantized_linear(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor &x = arguments[0].toTensor(), &codes = arguments[1].toTensor();
  const int64_t bits = arguments[4].toInt(), features = arguments[5].toInt();
  TORCH_CHECK(bits == 4 || bits == 8, plan.name, ": weights of ", bits, " bits are not supported; use 4 or 8");
  TORCH_CHECK(x.dim() >= 1 && codes.dim() == 4 && x.size(-1) <= codes.size(1) * codes.size(3) * (8 / bits) &&
                  features >= 0 && features <= codes.size(0) * codes.size(2),
              plan.name, ": input of shape ", x.sizes(), " does not fit codes of shape ", codes.sizes(), " with ",
              features, " output features of ", bits, " bits");
  new_with_features(x, features, card, results);
}

void shapes_of_rows(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results) {
  const at::Tensor& x = arguments[0].toTensor();
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, plan.name, ": expected [rows, columns] with columns > 0, got shape ",
              x.sizes());
  results.push_back(new_tensor(card, {x.size(0)}, at::kLong));
}

struct Known {
  const char* name;
  Plan::Shapes shapes;
  Plan::Flops flops;
};

// Operators that return new tensors. Those that are not listed use PyTorch's fake implementation, which is Python.
constexpr Known kKnown[] = {
    {"silu_and_mul", &shapes_of_half, nullptr},
    {"mul_and_silu", &shapes_of_half, nullptr},
    {"gelu_and_mul", &shapes_of_half, nullptr},
    {"fatrelu_and_mul", &shapes_of_half, nullptr},
    {"silu_and_mul_with_clamp", &shapes_of_half, nullptr},
    {"swigluoai_and_mul", &shapes_of_half, nullptr},
    {"gelu", &shapes_contiguous, nullptr},
    {"gelu_new", &shapes_contiguous, nullptr},
    {"gelu_fast", &shapes_contiguous, nullptr},
    {"quick_gelu", &shapes_contiguous, nullptr},
    {"relu2", &shapes_contiguous, nullptr},
    {"rms_norm", &shapes_as_first, nullptr},
    {"gemma_rms_norm", &shapes_as_first, nullptr},
    {"fused_add_rms_norm", &shapes_as_two, nullptr},
    {"fused_add_gemma_rms_norm", &shapes_as_two, nullptr},
    {"linear", &shapes_of_linear, &flops_of_linear},
    {"logits", &shapes_of_linear, &flops_of_linear},
    {"blocked_linear", &shapes_of_blocked_linear, &flops_with_features<2>},
    {"quantized_linear", &shapes_of_quantized_linear, &flops_with_features<5>},
    {"greedy_argmax", &shapes_of_rows, nullptr},
};

}  // namespace

bool launch_cpu_kernel(const char* name) {
  static torch::Library* const library = new torch::Library(
      torch::Library::IMPL, "backplane", std::make_optional(c10::DispatchKey::PrivateUse1), __FILE__, __LINE__);
  const std::string whole = std::string("backplane::") + name;
  const auto op = c10::Dispatcher::singleton().findSchema({whole, ""});
  TORCH_CHECK(op.has_value(), "there is no operator ", whole);
  if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
  auto plan = std::make_shared<Plan>(*op);
  for (const Known& known : kKnown) {
    if (std::strcmp(known.name, name) != 0) continue;
    plan->shapes = known.shapes;
    plan->flops = known.flops;
  }
  plan->details = details_of(plan->name);
  remember(plan);
  library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Launcher>(plan)));
  return true;
}

}  // namespace backplane::sim
