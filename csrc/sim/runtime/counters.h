// Counts where operators ran: on the card, on the card with the host waiting, or on the host.
#pragma once

#include <memory>
#include <string>

#include "runtime/plan.h"

namespace backplane::sim {

// The policy for an operator without an implementation for the card.
enum class Fallback : int { forbid = 0, warn = 1, allow = 2 };
void set_fallback(Fallback policy);
Fallback fallback();

void remember(std::shared_ptr<const Plan> plan);
void count_wait(const char* name);
// Returns how often this operator has fallen back, this time included.
uint64_t count_fallback(const std::string& name);

// Returns {"launched": {operator: count}, "waited": …, "fell_back": …, "implemented": [operator]} as JSON.
std::string report();
void reset_counters();

}  // namespace backplane::sim
