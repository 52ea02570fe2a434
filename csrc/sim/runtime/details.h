// What a launch moves and computes, where the size of its arguments does not say it.
//
// An operator that picks rows out of a table is as fast with a large table as with a small one, and attention as fast
// in a large cache: a model of a chip that charged whole tensors would answer another question. The functions here see
// the arguments inside the launch, so they can read how long each context is.
#pragma once

#include <string>

#include "runtime/plan.h"

namespace backplane::sim {

// Bytes that reading or writing the whole tensor once takes: what is repeated counts once, what is skipped not at all.
double bytes_in(const at::Tensor& tensor);

// Of an operator by its name with namespace and overload, or null where the default is right.
Plan::Details details_of(const std::string& name);

}  // namespace backplane::sim
