// Declares injected corruption: wrong values in memory that a task has just written.
#pragma once

#include "work.h"

namespace backplane::sim::driver {

// Corrupts an output of known element type.
void corrupt_elements(void* to, uint64_t bytes, bpsim_element element, const Strike& strike);
// Corrupts a copy, whose element type is unknown.
void corrupt_bytes(void* to, uint64_t bytes, const Strike& strike);

}  // namespace backplane::sim::driver
