// Declares fault injection: rules that count matching work and then inject their fault.
//
// Rules are matched when work is submitted, on the caller's thread, so the result does not depend on the scheduling of
// threads; the fault travels with the work and takes effect on the worker.
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

// Implemented in fault_spec.cpp: parses the whole specification, or fails with the rule and the mistake.
bpsim_status parse_faults(const char* spec, std::vector<FaultRule>* rules);
// Checks what holds for every rule, parsed or not; `text` is its name in the error text.
bpsim_status check_fault(const FaultRule& rule, const char* text);

class Faults {
 public:
  // While this is false, no other function needs to be called.
  bool armed() const { return armed_.load(std::memory_order_relaxed); }
  void add(const std::vector<FaultRule>& rules);
  void clear();
  uint64_t struck() const { return struck_.load(); }
  // Counts one event, and appends the faults that it triggers.
  void match(bpsim_fault_site site, const char* name, int32_t card, int32_t stream, uint64_t node,
             std::vector<Strike>* strikes);

 private:
  std::atomic<bool> armed_{false};
  std::atomic<uint64_t> struck_{0};
  std::mutex mutex_;
  std::vector<FaultRule> rules_;
};

}  // namespace backplane::sim::driver
