// Implements the modelled cost of tasks.

#include "model.h"

#include <algorithm>
#include <cmath>

#include "error.h"

namespace backplane::sim::driver {
namespace {

double time_of(double amount, double rate) { return rate > 0 ? amount / rate * 1e9 : 0; }

}  // namespace

double modelled_duration(const bpsim_model& model, bool crosses_link, double bytes, double flops) {
  if (crosses_link) return model.launch_overhead_ns + time_of(bytes, model.link_bandwidth);
  // Every relevant chip overlaps memory traffic and arithmetic, so the slower of the two determines the time.
  return model.launch_overhead_ns +
         std::max(time_of(bytes, model.memory_bandwidth), time_of(flops, model.flop_rate));
}

bpsim_status check_model(const bpsim_model& model) {
  const struct {
    const char* name;
    double value;
  } fields[] = {{"memory_bandwidth", model.memory_bandwidth},
                {"link_bandwidth", model.link_bandwidth},
                {"flop_rate", model.flop_rate},
                {"launch_overhead_ns", model.launch_overhead_ns}};
  for (const auto& field : fields)
    if (!std::isfinite(field.value) || field.value < 0)
      return fail(BPSIM_INVALID, "model: %s is %g; it must be a number of at least 0 (0: not counted)", field.name,
                  field.value);
  return BPSIM_OK;
}

}  // namespace backplane::sim::driver
