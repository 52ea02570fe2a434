// Unrolls loops at compile time, so that arrays of vectors become registers.
#pragma once

#include <utility>

#include "simd.h"

namespace backplane::cpu {

// Calls f(0), f(1), … with compile-time constants. The compiler would unroll a loop too late to keep the accumulators
// in registers.
template <int... I, class F>
BACKPLANE_INLINE void unroll(std::integer_sequence<int, I...>, const F& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
BACKPLANE_INLINE void unroll(const F& f) {
  unroll(std::make_integer_sequence<int, N>{}, f);
}
#define BACKPLANE_UNROLL(NAME) [&](auto NAME) __attribute__((always_inline))

}  // namespace backplane::cpu
