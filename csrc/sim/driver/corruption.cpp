// Implements injected corruption of results.

#include "corruption.h"

#include <algorithm>
#include <cstring>

namespace backplane::sim::driver {
namespace {

uint64_t width_of(bpsim_element element) {
  switch (element) {
    case BPSIM_F64: return 8;
    case BPSIM_F32: return 4;
    case BPSIM_F16:
    case BPSIM_BF16: return 2;
    case BPSIM_OTHER: break;
  }
  return 1;
}

// Returns a quiet NaN, little endian.
uint64_t nan_of(bpsim_element element) {
  switch (element) {
    case BPSIM_F64: return 0x7ff8000000000000;
    case BPSIM_F32: return 0x7fc00000;
    case BPSIM_F16: return 0x7e00;
    case BPSIM_BF16: return 0x7fc0;
    case BPSIM_OTHER: break;
  }
  return 0;
}

// Calls change(address) for the elements to corrupt: the middle elements of equal parts of the output.
template <class Change>
void spread(void* to, uint64_t bytes, uint64_t width, uint64_t wanted, Change&& change) {
  const uint64_t count = bytes / width;
  const uint64_t struck = std::min(wanted, count);
  for (uint64_t i = 0; i < struck; ++i) {
    const double middle = (static_cast<double>(i) + 0.5) * static_cast<double>(count) / static_cast<double>(struck);
    const uint64_t at = std::min(static_cast<uint64_t>(middle), count - 1);
    change(static_cast<unsigned char*>(to) + at * width);
  }
}

}  // namespace

void corrupt_elements(void* to, uint64_t bytes, bpsim_element element, const Strike& strike) {
  const uint64_t width = width_of(element);
  const uint64_t nan = nan_of(element);
  const bool as_nan = strike.corruption == BPSIM_CORRUPT_NAN && nan != 0;
  spread(to, bytes, width, strike.elements, [&](unsigned char* at) {
    if (as_nan)
      std::memcpy(at, &nan, width);
    else
      at[width - 1] ^= 0x40;  // for a float, the highest bit of the exponent
  });
}

void corrupt_bytes(void* to, uint64_t bytes, const Strike& strike) {
  if (strike.corruption == BPSIM_CORRUPT_BITFLIP || bytes < 8) {
    spread(to, bytes, 1, strike.elements, [](unsigned char* at) { *at ^= 0x40; });
    return;
  }
  spread(to, bytes, 8, strike.elements, [](unsigned char* at) { std::memset(at, 0xff, 8); });
}

}  // namespace backplane::sim::driver
