// Matches submitted work against the fault rules, and checks rules.

#include "faults.h"

#include <cstring>

#include "error.h"

namespace backplane::sim::driver {
namespace {

// '*' matches any text, including none.
bool fits(const char* pattern, const char* name) {
  const char* star = nullptr;
  const char* resume = nullptr;
  while (*name) {
    if (*pattern == '*') {
      star = pattern++;
      resume = name;
    } else if (*pattern == *name) {
      ++pattern;
      ++name;
    } else if (star) {
      pattern = star + 1;
      name = ++resume;
    } else {
      return false;
    }
  }
  while (*pattern == '*') ++pattern;
  return *pattern == 0;
}

}  // namespace

bpsim_status check_fault(const FaultRule& rule, const char* text) {
  const bool at_alloc = rule.site == BPSIM_AT_ALLOC;
  if (rule.kind == BPSIM_FAULT_OOM && !at_alloc)
    return fail(BPSIM_INVALID, "fault '%s': only an allocation can be out of memory, as in oom@alloc=17", text);
  if (at_alloc && rule.kind != BPSIM_FAULT_OOM && rule.kind != BPSIM_FAULT_LOST)
    return fail(BPSIM_INVALID, "fault '%s': an allocation can only be oom or lost, as in oom@alloc=17", text);
  if (at_alloc && (rule.stream >= 0 || !rule.name.empty()))
    return fail(BPSIM_INVALID, "fault '%s': allocations have no name and no stream=, only a number, as in "
                "oom@alloc=17,card=1", text);
  if (rule.nth == 0) return fail(BPSIM_INVALID, "fault '%s': counting begins at 1, as in fail@launch=1", text);
  if (rule.elements == 0)
    return fail(BPSIM_INVALID, "fault '%s': elements must be at least 1, as in corrupt@launch=matmul*,elements=2",
                text);
  if (rule.card < -1 || rule.card >= BPSIM_MAX_CARDS)
    return fail(BPSIM_INVALID, "fault '%s': there is no card %d; cards are 0 to %d", text, rule.card,
                BPSIM_MAX_CARDS - 1);
  if (rule.stream < -1 || rule.stream >= BPSIM_MAX_STREAMS)
    return fail(BPSIM_INVALID, "fault '%s': there is no stream %d; streams of a card are 0 to %d", text, rule.stream,
                BPSIM_MAX_STREAMS - 1);
  return BPSIM_OK;
}

void Faults::add(const std::vector<FaultRule>& rules) {
  std::lock_guard<std::mutex> lock(mutex_);
  rules_.insert(rules_.end(), rules.begin(), rules.end());
  armed_.store(!rules_.empty());
}

void Faults::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  rules_.clear();
  armed_.store(false);
}

void Faults::match(bpsim_fault_site site, const char* name, int32_t card, int32_t stream, uint64_t node,
                   std::vector<Strike>* strikes) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (FaultRule& rule : rules_) {
    if (rule.site != site || (rule.card >= 0 && rule.card != card) || (rule.stream >= 0 && rule.stream != stream))
      continue;
    if (!rule.name.empty() && !fits(rule.name.c_str(), name)) continue;
    if (++rule.matched < rule.nth || (rule.times != 0 && rule.struck >= rule.times)) continue;
    ++rule.struck;
    struck_.fetch_add(1);
    strikes->push_back({node, rule.kind, rule.corruption, rule.elements, 0});
  }
}

}  // namespace backplane::sim::driver
