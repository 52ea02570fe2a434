// Declares how many bytes and floating-point operations a launch takes, for operators whose argument sizes do not
// determine it.
//
// A gather of rows is as fast from a large table as from a small one, and attention as fast in a large cache: a chip
// model that charged whole tensors would overestimate both. These functions run inside the launch, so they can read the
// length of each context.
#pragma once

#include <string>

#include "runtime/plan.h"

namespace backplane::sim {

// Returns the bytes that reading or writing the whole tensor once takes: expanded elements count once, skipped ones not
// at all.
double bytes_in(const at::Tensor& tensor);

// Returns the function for an operator, by its name with namespace and overload; null if the default is right.
Plan::Details details_of(const std::string& name);

}  // namespace backplane::sim
