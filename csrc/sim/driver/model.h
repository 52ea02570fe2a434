// Declares the modelled cost of a task: its duration on the chip that the configuration describes.
#pragma once

#include "work.h"

namespace backplane::sim::driver {

double modelled_duration(const bpsim_model& model, bool crosses_link, double bytes, double flops);
// Returns BPSIM_INVALID if a rate is negative or not a number.
bpsim_status check_model(const bpsim_model& model);

}  // namespace backplane::sim::driver
