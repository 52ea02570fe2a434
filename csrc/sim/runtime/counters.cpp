// Counts launches, waits and fallbacks per operator, and reports them as JSON.

#include "runtime/counters.h"

#include <map>
#include <mutex>
#include <sstream>
#include <vector>

namespace backplane::sim {
namespace {

struct Counters {
  std::mutex lock;
  std::vector<std::shared_ptr<const Plan>> plans;
  std::map<std::string, uint64_t> waits, fallbacks;
  std::atomic<int> policy{static_cast<int>(Fallback::warn)};
};

Counters& counters() {
  static Counters* const only = new Counters;
  return *only;
}

// Operator names need no escaping.
void write(std::ostringstream& out, const char* key, const std::map<std::string, uint64_t>& counts) {
  out << '"' << key << "\": {";
  const char* separator = "";
  for (const auto& [name, number] : counts) {
    out << separator << '"' << name << "\": " << number;
    separator = ", ";
  }
  out << "}, ";
}

}  // namespace

void set_fallback(Fallback policy) { counters().policy.store(static_cast<int>(policy)); }
Fallback fallback() { return static_cast<Fallback>(counters().policy.load()); }

void remember(std::shared_ptr<const Plan> plan) {
  std::lock_guard<std::mutex> hold(counters().lock);
  counters().plans.push_back(std::move(plan));
}

void count_wait(const char* name) {
  std::lock_guard<std::mutex> hold(counters().lock);
  ++counters().waits[name];
}

uint64_t count_fallback(const std::string& name) {
  std::lock_guard<std::mutex> hold(counters().lock);
  return ++counters().fallbacks[name];
}

std::string report() {
  Counters& all = counters();
  std::lock_guard<std::mutex> hold(all.lock);
  std::map<std::string, uint64_t> launched, waited = all.waits;
  std::ostringstream names;
  const char* separator = "";
  for (const auto& plan : all.plans) {
    names << separator << '"' << plan->name << '"';
    separator = ", ";
    const uint64_t number = plan->launched.load();
    if (number != 0) (plan->waits ? waited : launched)[plan->name] += number;
  }
  std::ostringstream out;
  out << '{';
  write(out, "launched", launched);
  write(out, "waited", waited);
  write(out, "fell_back", all.fallbacks);
  out << "\"implemented\": [" << names.str() << "]}";
  return out.str();
}

void reset_counters() {
  Counters& all = counters();
  std::lock_guard<std::mutex> hold(all.lock);
  for (const auto& plan : all.plans) plan->launched.store(0);
  all.waits.clear();
  all.fallbacks.clear();
}

}  // namespace backplane::sim
