// Declares the AMX bfloat16 kernels for the AMX set of dot kernels.
#pragma once

#include "dot_kernels.h"

namespace backplane::cpu {

// Returns null if the processor has AMX without bfloat16.
const DecodedKernels* amx_decoded();

}  // namespace backplane::cpu
