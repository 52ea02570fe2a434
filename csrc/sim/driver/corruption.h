// Injected corruption: wrong values in memory that a task has just written.
#pragma once

#include "work.h"

namespace backplane::sim::driver {

// An output whose elements are known.
void corrupt_elements(void* to, uint64_t bytes, bpsim_element element, const Strike& strike);
// A copy, whose elements are not.
void corrupt_bytes(void* to, uint64_t bytes, const Strike& strike);

}  // namespace backplane::sim::driver
