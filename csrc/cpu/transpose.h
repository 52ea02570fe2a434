// Transposes a square matrix of vectors in registers.
#pragma once

#include <utility>

#include "simd.h"

namespace backplane::cpu {

// Selects elements of a and b by index; indices of b begin at W.
template <int W, int... From>
BACKPLANE_INLINE Floats<W> choose(Floats<W> a, Floats<W> b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, From...);
#else
  return __builtin_shuffle(a, b, Ints<W>{From...});
#endif
}

// Swaps the upper right with the lower left quarter of each 2D x 2D submatrix of two rows that are D apart.
template <int W, int D, int... J>
BACKPLANE_INLINE void swap_quarters(Floats<W>& upper, Floats<W>& lower, std::integer_sequence<int, J...>) {
  const Floats<W> a = upper, b = lower;
  upper = choose<W, (J & D ? W + J - D : J)...>(a, b);
  lower = choose<W, (J & D ? W + J : J + D)...>(a, b);
}

template <int W, int D, int... R>
BACKPLANE_INLINE void swap_at_distance(Floats<W> (&rows)[W], std::integer_sequence<int, R...>) {
  // R counts the pairs; the index of the upper row of a pair has bit D clear.
  (swap_quarters<W, D>(rows[R / D * 2 * D + R % D], rows[R / D * 2 * D + R % D + D],
                       std::make_integer_sequence<int, W>{}),
   ...);
}

template <int W, int D = 1>
BACKPLANE_INLINE void transpose(Floats<W> (&rows)[W]) {
  swap_at_distance<W, D>(rows, std::make_integer_sequence<int, W / 2>{});
  if constexpr (2 * D < W) transpose<W, 2 * D>(rows);
}

}  // namespace backplane::cpu
