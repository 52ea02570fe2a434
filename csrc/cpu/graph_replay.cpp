// Replays a graph: calls kernel after kernel with prepared arguments, without Python or the dispatcher.

#include <c10/core/InferenceMode.h>

#include <chrono>

#include "graph.h"

namespace backplane::cpu {
namespace {

// Ensures that a result is at its address. A kernel that got its old addresses has put its results there. One that
// allocated differently than at the capture has not, and its results are copied.
void require_place(const GraphStep& step, const GraphResult& expected, const at::Tensor& found, int64_t* copies) {
  const at::Tensor& place = expected.place;
  TORCH_CHECK(found.sizes() == place.sizes() && found.scalar_type() == place.scalar_type(), step.op->name,
              " returned shape ", found.sizes(), " at a replay and ", place.sizes(),
              " at the capture: its results depend on values, so it cannot be part of a graph");
  if (found.const_data_ptr() == place.const_data_ptr() && found.strides() == place.strides()) return;
  place.copy_(found.clone());
  ++*copies;
}

}  // namespace

void Graph::replay(bool timed) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point began;
  if (timed) {
    seconds.clear();
    began = Clock::now();
  }
  c10::InferenceMode inference(true);
  ReplayAllocations allocations;
  torch::jit::Stack stack;
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  for (const GraphStep& step : steps) {
    stack.assign(step.arguments.begin(), step.arguments.end());
    allocations.next(&step.allocations);
    step.op->kernel->callBoxed(step.op->op, keys, &stack);
    for (const GraphResult& expected : step.results) {
      const c10::IValue& value = stack[expected.result];
      if (!expected.listed) {
        require_place(step, expected, value.toTensor(), &copies);
        continue;
      }
      const c10::ArrayRef<c10::IValue> list = value.toListRef();
      TORCH_CHECK(expected.item < list.size(), step.op->name,
                  " returned fewer results at a replay than at the capture");
      require_place(step, expected, list[expected.item].toTensor(), &copies);
    }
    stack.clear();
    for (const GraphAllocation& one : step.allocations) {
      if (one.block == nullptr || !one.block->replaying) continue;
      pool->hold();  // never dropped: the kernel still holds a tensor there
      TORCH_CHECK(false, step.op->name,
                  " kept memory that it allocated at a replay and that later operators overwrite");
    }
    if (timed) {
      const Clock::time_point now = Clock::now();
      seconds.push_back(std::chrono::duration<double>(now - began).count());
      began = now;
    }
  }
}

Graph::~Graph() {
  steps.clear();
  pool->leave();
}

}  // namespace backplane::cpu
