// Defines how an operator is launched. The plan is derived from its schema once, when the operator is registered.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <string>

#include "runtime/state.h"

namespace backplane::sim {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = c10::SmallVector<at::Tensor, 2>;

struct Plan {
  enum class Kind : uint8_t { other, tensor, tensors, optional_tensors, generator, device };
  struct Argument {
    Kind kind;
    bool written;
    bool out;  // a keyword `out` that is resized to fit
  };
  // Allocates the results of an operator that returns new tensors: shapes and types, on the card.
  using Shapes = void (*)(const Plan&, Arguments, c10::DeviceIndex, Results&);
  // Resizes the `out` arguments of an operator.
  using Sizes = void (*)(const Plan&, Arguments, c10::DeviceIndex);
  // Returns the floating-point operations, for the chip model; null if memory traffic dominates.
  using Flops = double (*)(Arguments);

  // What the chip model, or an injected fault, needs about one run. The tensors are the kernel's, so their data can be
  // read.
  struct Detail {
    double bytes = 0;   // moved between the memory and the chip
    double flops = 0;
    at::Tensor output;  // the part of the written arguments that is written, or undefined
  };
  // For an operator that accesses a part of its arguments, depending on shapes or data; called inside the launch. Null:
  // `bytes` is the size of all arguments and results.
  using Details = Detail (*)(Arguments);

  // A result is the argument with this index, or new.
  static constexpr int kNew = -1;

  explicit Plan(const c10::OperatorHandle& op);

  c10::OperatorHandle op;
  std::string name;  // with namespace and overload; used in errors, faults and traces
  c10::SmallVector<Argument, 8> arguments;
  c10::SmallVector<int, 2> results;
  Shapes shapes = nullptr;
  Sizes sizes = nullptr;
  Flops flops = nullptr;
  Details details = nullptr;
  bool waits = false;          // the shape of the result depends on data, so the host waits
  bool host_indices = false;   // index tensors may be on the host; they are copied to the card
  bool has_out = false;
  bool makes_new = false;

  mutable std::atomic<uint64_t> launched{0};
};

// Returns the card of an operator's tensors. All must be on one card, except host scalars that are only read.
c10::DeviceIndex card_of(const Plan& plan, Arguments arguments);

// Shapes and sizes by PyTorch's own meta kernels: right for every operator that has one, and slow if it is Python.
void shapes_by_meta(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results);
void sizes_by_meta(const Plan& plan, Arguments arguments, c10::DeviceIndex card);

}  // namespace backplane::sim
