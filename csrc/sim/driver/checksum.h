// Declares checksums of memory, for copies that are checked.
#pragma once

#include "work.h"

namespace backplane::sim::driver {

// Any change within one 8-byte word changes the checksum; of other changes, one in 2^64 does not.
uint64_t checksum(const void* data, uint64_t bytes);
// Returns the checksum that the destination of a copy or fill must have afterwards.
uint64_t checksum_of_source(const Task& task);

}  // namespace backplane::sim::driver
