// How one operator is launched: read off its schema once, when it is registered.
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
  // Makes the results of an operator that returns new tensors: shapes and types, on the card.
  using Shapes = void (*)(const Plan&, Arguments, c10::DeviceIndex, Results&);
  // Gives the `out` arguments of an operator their size.
  using Sizes = void (*)(const Plan&, Arguments, c10::DeviceIndex);
  // Floating-point operations, for the model of a chip; null where the memory traffic is what counts.
  using Flops = double (*)(Arguments);

  // What the model of a chip, and an injected fault, ask about one run. Tensors are the kernel's: their data can be read.
  struct Detail {
    double bytes = 0;   // moved between the memory and the chip
    double flops = 0;
    at::Tensor output;  // where it writes, if that is less than the arguments that are written; or undefined
  };
  // Of an operator that touches a part of its arguments, by shape or by data; asked inside the launch. Null: `bytes` is
  // the size of all arguments and results.
  using Details = Detail (*)(Arguments);

  // A result is the argument of this number, or new.
  static constexpr int kNew = -1;

  explicit Plan(const c10::OperatorHandle& op);

  c10::OperatorHandle op;
  std::string name;  // with namespace and overload: what errors, faults and traces say
  c10::SmallVector<Argument, 8> arguments;
  c10::SmallVector<int, 2> results;
  Shapes shapes = nullptr;
  Sizes sizes = nullptr;
  Flops flops = nullptr;
  Details details = nullptr;
  bool waits = false;          // the shape of the result depends on data: the host waits for it
  bool host_indices = false;   // index tensors may be on the host; they are moved
  bool has_out = false;
  bool makes_new = false;

  mutable std::atomic<uint64_t> launched{0};
};

// The card of an operator's tensors; they must all be on one, but for host scalars that are only read.
c10::DeviceIndex card_of(const Plan& plan, Arguments arguments);

// Shapes and sizes by PyTorch's own meta kernels: right for every operator that has one, and slow where it is Python.
void shapes_by_meta(const Plan& plan, Arguments arguments, c10::DeviceIndex card, Results& results);
void sizes_by_meta(const Plan& plan, Arguments arguments, c10::DeviceIndex card);

}  // namespace backplane::sim
