// Checksums of memory, for copies that are checked.
#pragma once

#include "work.h"

namespace backplane::sim::driver {

// Any change within one word of eight bytes changes it; of others one in 2^64 does not.
uint64_t checksum(const void* data, uint64_t bytes);
// What `checksum` of a copy's or fill's destination must be afterwards.
uint64_t checksum_of_source(const Task& task);

}  // namespace backplane::sim::driver
