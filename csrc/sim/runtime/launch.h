// Declares operators as launches: the CPU kernel runs later, on the stream's worker thread, on the memory of the card.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <memory>

#include "runtime/plan.h"

namespace backplane::sim {

// Replaces the arguments on the stack by the results: queues the launch and returns without waiting, unless the plan
// waits.
void launch(const Plan& plan, torch::jit::Stack* stack);

// Queues any work on the current stream of a card, with the memory it accesses. `name` must live forever.
struct Touched {
  const at::Tensor& tensor;
  bool written;
};
using Work = std::function<void()>;
void enqueue(const char* name, c10::DeviceIndex card, c10::ArrayRef<Touched> touched, Work work);

// A CPU tensor over the memory of a device tensor; for use inside a launch only.
struct HostView {
  explicit HostView(const at::Tensor& tensor);
  at::Tensor tensor() const;

  void* data;
  c10::SmallVector<int64_t, 10> dims;  // sizes, then strides
  at::ScalarType type;
};

// The boxed kernel that is registered for an operator.
class Launcher final : public c10::OperatorKernel {
 public:
  explicit Launcher(std::shared_ptr<const Plan> plan) : plan_(std::move(plan)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) { launch(*plan_, stack); }

 private:
  std::shared_ptr<const Plan> plan_;
};

}  // namespace backplane::sim
