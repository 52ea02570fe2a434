// Declares copies and fills.
#pragma once

#include "driver.h"

namespace backplane::sim::driver {

class Driver;
class Stream;

bpsim_status copy(Driver& driver, Stream& stream, bpsim_direction direction, void* to, const void* from, uint64_t bytes,
                  bool wait);
bpsim_status fill(Driver& driver, Stream& stream, void* to, int value, uint64_t bytes);

}  // namespace backplane::sim::driver
