// Declares what Python sets and queries beside the driver's own C interface: plain C, called through ctypes.
#pragma once

#include "driver/driver.h"

namespace backplane::sim {

// Registers the launch of an operator's CPU kernel for the card; returns false if the operator has none.
bool launch_cpu_kernel(const char* name);

}  // namespace backplane::sim
