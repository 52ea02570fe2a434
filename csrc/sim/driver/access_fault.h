// Explains a stray access to a card's memory, or to pinned memory that a copy may be using, before it ends the process.
#pragma once

#include "driver.h"

namespace backplane::sim::driver {

class Driver;

// Sets the driver whose memory is watched; null: none.
void watch_accesses(Driver* driver);
bpsim_status install_access_handler();
// Restores the previous handler, unless another one was installed on top of ours.
void remove_access_handler();

}  // namespace backplane::sim::driver
