// What dot_amx_bf16.cpp gives to the set of products that uses it.
#pragma once

#include "dot_kernels.h"

namespace backplane::cpu {

// None where the processor has AMX without bfloat16.
const DecodedKernels* amx_decoded();

}  // namespace backplane::cpu
