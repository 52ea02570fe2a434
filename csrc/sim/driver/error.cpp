// Implements the per-thread error text.

#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace backplane::sim::driver {
namespace {

thread_local char text[2048];

}  // namespace

bpsim_status fail(bpsim_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return status;
}

const char* last_error() { return text; }

std::string size_text(uint64_t bytes) {
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  char written[64];
  if (bytes < 1024) {
    std::snprintf(written, sizeof written, "%llu bytes", static_cast<unsigned long long>(bytes));
    return written;
  }
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < sizeof units / sizeof *units; ++unit) value /= 1024;
  std::snprintf(written, sizeof written, "%.1f %s (%llu bytes)", value, units[unit],
                static_cast<unsigned long long>(bytes));
  return written;
}

}  // namespace backplane::sim::driver
