// Parses the one-line fault specification; driver_faults.h documents its grammar.
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "error.h"
#include "faults.h"

namespace backplane::sim::driver {
namespace {

constexpr const char* kExample = "oom@alloc=17;fail@launch=250;corrupt@launch=matmul*,nth=3,kind=nan";

template <class Value>
struct Word {
  const char* text;
  Value value;
};
constexpr Word<bpsim_fault_kind> kKinds[] = {{"oom", BPSIM_FAULT_OOM},
                                             {"fail", BPSIM_FAULT_FAIL},
                                             {"hang", BPSIM_FAULT_HANG},
                                             {"lost", BPSIM_FAULT_LOST},
                                             {"corrupt", BPSIM_FAULT_CORRUPT}};
constexpr Word<bpsim_fault_site> kSites[] = {
    {"alloc", BPSIM_AT_ALLOC}, {"launch", BPSIM_AT_LAUNCH}, {"copy", BPSIM_AT_COPY}};
constexpr Word<bpsim_corruption> kCorruptions[] = {{"nan", BPSIM_CORRUPT_NAN}, {"bitflip", BPSIM_CORRUPT_BITFLIP}};

template <class Value, size_t count>
bool look_up(const Word<Value> (&words)[count], const std::string& text, Value* value) {
  for (const auto& word : words)
    if (text == word.text) {
      *value = word.value;
      return true;
    }
  return false;
}

template <class Value, size_t count>
std::string list(const Word<Value> (&words)[count]) {
  std::string all;
  for (const auto& word : words) all += (all.empty() ? "" : ", ") + std::string(word.text);
  return all;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

bool is_number(const std::string& text, uint64_t most, uint64_t* value) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
  errno = 0;
  *value = std::strtoull(text.c_str(), nullptr, 10);
  return errno == 0 && *value <= most;
}

bool is_name(const std::string& text) {
  if (text.empty() || !(std::isalpha(static_cast<unsigned char>(text[0])) || text[0] == '_' || text[0] == '*'))
    return false;
  for (const char each : text)
    if (!std::isalnum(static_cast<unsigned char>(each)) && !std::strchr("_*.:<>-+/", each)) return false;
  return true;
}

// Parses one rule; error texts quote `text`.
class RuleParser {
 public:
  explicit RuleParser(std::string text) : text_(std::move(text)) {}

  bpsim_status parse(FaultRule* rule) {
    if (text_.empty())
      return fail(BPSIM_INVALID, "faults: an empty rule; rules are separated by one ';', as in %s", kExample);
    const size_t comma = text_.find(',');
    bpsim_status status = head(text_.substr(0, comma), rule);
    for (size_t at = comma; status == BPSIM_OK && at != std::string::npos;) {
      const size_t next = text_.find(',', at + 1);
      status = key(text_.substr(at + 1, next == std::string::npos ? next : next - at - 1), rule);
      at = next;
    }
    return status == BPSIM_OK ? check_fault(*rule, text_.c_str()) : status;
  }

 private:
  bpsim_status wrong(const std::string& mistake) const {
    return fail(BPSIM_INVALID, "fault '%s': %s. An example: %s", text_.c_str(), mistake.c_str(), kExample);
  }

  bpsim_status head(const std::string& part, FaultRule* rule) {
    const size_t at = part.find('@');
    const size_t equals = part.find('=');
    if (at == std::string::npos || equals == std::string::npos || equals < at)
      return wrong("a rule begins with kind@site=which");
    const std::string kind = part.substr(0, at), site = part.substr(at + 1, equals - at - 1);
    if (!look_up(kKinds, kind, &rule->kind))
      return wrong("'" + kind + "' is not a kind of fault; use one of " + list(kKinds));
    if (!look_up(kSites, site, &rule->site))
      return wrong("'" + site + "' is not a site; use one of " + list(kSites));
    const std::string which = part.substr(equals + 1);
    if (is_number(which, UINT64_MAX, &rule->nth)) {
      by_number_ = true;
    } else if (is_name(which)) {
      rule->name = which;
    } else {
      return wrong("'" + which + "' is neither a number nor the name of a launch");
    }
    return BPSIM_OK;
  }

  bpsim_status key(const std::string& part, FaultRule* rule) {
    const size_t equals = part.find('=');
    if (equals == std::string::npos) return wrong("'" + part + "' is not of the form key=value");
    const std::string name = part.substr(0, equals), value = part.substr(equals + 1);
    if (!seen_.insert(name).second) return wrong("'" + name + "' is given twice");
    uint64_t number = 0;
    if (name == "card" || name == "stream") {
      if (!is_number(value, 1u << 20, &number)) return wrong("'" + value + "' is not a " + name + " number");
      (name == "card" ? rule->card : rule->stream) = static_cast<int32_t>(number);
      return BPSIM_OK;
    }
    if (name == "nth") {
      if (by_number_) return wrong("nth= needs a name; the number after the site already is the count");
      if (!is_number(value, UINT64_MAX, &rule->nth)) return wrong("nth must be a number, not '" + value + "'");
      return BPSIM_OK;
    }
    if (name == "times") {
      if (value == "always") {
        rule->times = 0;
        return BPSIM_OK;
      }
      if (!is_number(value, UINT64_MAX, &rule->times) || rule->times == 0)
        return wrong("times must be a number of at least 1, or always, not '" + value + "'");
      return BPSIM_OK;
    }
    if (name == "kind" || name == "elements") {
      if (rule->kind != BPSIM_FAULT_CORRUPT) return wrong("'" + name + "' is a key of corrupt only");
      if (name == "kind") {
        if (!look_up(kCorruptions, value, &rule->corruption))
          return wrong("'" + value + "' is not a kind of corruption; use one of " + list(kCorruptions));
        return BPSIM_OK;
      }
      if (!is_number(value, UINT32_MAX, &number)) return wrong("elements must be a number, not '" + value + "'");
      rule->elements = static_cast<uint32_t>(number);
      return BPSIM_OK;
    }
    return wrong("'" + name + "' is not a key; use one of card, stream, nth, times, kind, elements");
  }

  const std::string text_;
  bool by_number_ = false;
  std::set<std::string> seen_;
};

}  // namespace

bpsim_status parse_faults(const char* spec, std::vector<FaultRule>* rules) {
  rules->clear();
  if (!spec || trimmed(spec).empty()) return BPSIM_OK;
  const std::string all = spec;
  std::vector<FaultRule> parsed;
  for (size_t at = 0;;) {
    const size_t end = all.find(';', at);
    FaultRule rule;
    const bpsim_status status =
        RuleParser(trimmed(all.substr(at, end == std::string::npos ? end : end - at))).parse(&rule);
    if (status != BPSIM_OK) return status;
    parsed.push_back(rule);
    if (end == std::string::npos) break;
    at = end + 1;
  }
  *rules = std::move(parsed);
  return BPSIM_OK;
}

}  // namespace backplane::sim::driver
