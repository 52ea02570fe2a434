// Modelled cost: how long a task would last on the chip that was described.
#pragma once

#include "work.h"

namespace backplane::sim::driver {

double modelled_duration(const bpsim_model& model, bool crosses_link, double bytes, double flops);
// BPSIM_INVALID where a rate is negative or no number.
bpsim_status check_model(const bpsim_model& model);

}  // namespace backplane::sim::driver
