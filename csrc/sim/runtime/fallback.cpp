// Runs operators that have no implementation for the card on the host: copies their tensors there and the results back.
//
// All fallbacks pass here. They are counted, and raise if the policy forbids them.

#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include "runtime/counters.h"

namespace backplane::sim {
namespace {

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = toString(op.operator_name());
  const uint64_t times = count_fallback(name);
  const Fallback policy = fallback();
  TORCH_CHECK(policy != Fallback::forbid, name,
              " has no implementation on bpnpu, and running it on the host is forbidden; set "
              "BACKPLANE_SIM_FALLBACK=warn or allow, or add it to csrc/sim/runtime/operators.cpp");
  if (policy == Fallback::warn && times == 1)
    TORCH_WARN(name, " has no implementation on bpnpu and runs on the host: its tensors are copied there and back "
               "(shown once; BACKPLANE_SIM_FALLBACK=forbid makes it an error)");
  at::native::cpu_fallback(op, stack);
}

}  // namespace
}  // namespace backplane::sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&backplane::sim::on_the_host>());
}
