// Explains a stray access to a card's memory, or to pinned memory that a copy may be using, before the process dies of
// it.
#pragma once

#include "driver.h"

namespace backplane::sim::driver {

class Driver;

// Whose memory is watched; null: nobody's.
void watch_accesses(Driver* driver);
bpsim_status install_access_handler();
// Puts back what was there before, unless somebody else is on top by now.
void remove_access_handler();

}  // namespace backplane::sim::driver
