// Loops whose counter is a constant, so that arrays of vectors become registers.
#pragma once

#include <utility>

#include "simd.h"

namespace backplane::cpu {

// Calls f(0), f(1), … with constants. A loop would be unrolled too late for the sums to become registers.
template <int... I, class F>
BACKPLANE_INLINE void each(std::integer_sequence<int, I...>, const F& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
BACKPLANE_INLINE void each(const F& f) {
  each(std::make_integer_sequence<int, N>{}, f);
}
#define BACKPLANE_EACH(NAME) [&](auto NAME) __attribute__((always_inline))

}  // namespace backplane::cpu
