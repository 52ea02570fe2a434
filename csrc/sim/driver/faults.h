// Faults on demand: rules that count what they match and then strike.
//
// Rules are matched when work is submitted, on the caller's thread, so what they strike does not depend on how threads
// are scheduled; the strike travels with the work and happens on the worker.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "work.h"

namespace backplane::sim::driver {

struct FaultRule {
  bpsim_fault_kind kind = BPSIM_FAULT_FAIL;
  bpsim_fault_site site = BPSIM_AT_LAUNCH;
  std::string name;  // empty: every one
  int32_t card = -1, stream = -1;
  uint64_t nth = 1, times = 1;
  bpsim_corruption corruption = BPSIM_CORRUPT_NAN;
  uint32_t elements = 1;

  uint64_t matched = 0, struck = 0;
};

// fault_spec.cpp: the whole spec, or an error that names the rule and the mistake.
bpsim_status parse_faults(const char* spec, std::vector<FaultRule>* rules);
// What holds however a rule was given; `rule` is what the text calls it.
bpsim_status check_fault(const FaultRule& rule, const char* text);

class Faults {
 public:
  // Nothing else is asked while this is false.
  bool armed() const { return armed_.load(std::memory_order_relaxed); }
  void add(const std::vector<FaultRule>& rules);
  void clear();
  uint64_t struck() const { return struck_.load(); }
  // Counts one event, and appends what strikes it.
  void match(bpsim_fault_site site, const char* name, int32_t card, int32_t stream, uint64_t node,
             std::vector<Strike>* strikes);

 private:
  std::atomic<bool> armed_{false};
  std::atomic<uint64_t> struck_{0};
  std::mutex mutex_;
  std::vector<FaultRule> rules_;
};

}  // namespace backplane::sim::driver
