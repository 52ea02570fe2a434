// Stores the text behind a status: one buffer per thread, of fixed size, so that reporting an error cannot fail.
#pragma once

#include <cstdint>
#include <string>

#include "driver.h"

namespace backplane::sim::driver {

// Writes the calling thread's text and returns `status`.
[[gnu::format(printf, 2, 3)]] bpsim_status fail(bpsim_status status, const char* format, ...);
const char* last_error();

// Formats a size: "20.0 MiB (20971520 bytes)"; below 1 KiB "512 bytes".
std::string size_text(uint64_t bytes);

}  // namespace backplane::sim::driver
