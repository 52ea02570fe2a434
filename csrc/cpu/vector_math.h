// Implements exponential, logistic function, hyperbolic tangent and error function on vectors.
//
// The accuracy is that of float32 results of networks: within a few units in the last place (the error function within
// 2e-7), and NaN stays NaN. The exponential is zero where the result would be subnormal.
#pragma once

#include <limits>

#include "simd.h"

namespace backplane::cpu {

template <int W>
BACKPLANE_INLINE Floats<W> exponential(Floats<W> x) {
  constexpr float kLowest = -87.3365448f, kHighest = 88.7228317f;  // between them every result is a normal number
  constexpr float kRounder = 12582912.0f;                          // 1.5 * 2^23: leaves the integer part
  const Floats<W> shifted = x * 1.44269504f + kRounder;
  const Floats<W> n = shifted - kRounder;
  // ln 2 in two parts; the first has few enough digits that n times it is exact.
  Floats<W> r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats<W> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // Adds n, the lowest bits of `shifted`, to the exponent.
  Floats<W> y = bits_as<Floats<W>>(Words<W>(bits_as<Words<W>>(p) + (bits_as<Words<W>>(shifted) << 23)));
  y = x < kLowest ? Floats<W>{} : y;
  return x <= kHighest ? y : x * std::numeric_limits<float>::infinity();  // NaN too
}

// Returns 1 / x for x of 1 or more, within two units in the last place. A division takes an ARM processor as long as
// about twenty multiplications.
template <int W>
BACKPLANE_INLINE Floats<W> reciprocal(Floats<W> x) {
#if defined(__aarch64__)
  if constexpr (W == 4) {
    const auto v = bits_as<float32x4_t>(x);
    float32x4_t y = vrecpeq_f32(v);
    y = vmulq_f32(y, vrecpsq_f32(v, y));
    y = vmulq_f32(y, vrecpsq_f32(v, y));
    return bits_as<Floats<W>>(y);
  }
#endif
  return 1.0f / x;
}

// Returns 2 to the power of x, for x at most a rounding error above zero. Returns zero below the smallest normal
// number; NaN stays NaN.
template <int W>
BACKPLANE_INLINE Floats<W> power_of_two(Floats<W> x) {
  // 1.5 * 2^23 leaves the integer part, and 127 turns it into the exponent of the power.
  constexpr float kRounder = 12582912.0f + 127.0f;
  const Floats<W> shifted = x + kRounder;
  const Floats<W> f = x - (shifted - kRounder), ff = f * f;
  const Floats<W> whole = bits_as<Floats<W>>(Words<W>(bits_as<Words<W>>(shifted) << 23));
  // (2^f - 1) / f, in two halves that do not depend on each other.
  const Floats<W> low = f * 2.40221197e-1f + 6.93146967e-1f;
  const Floats<W> high = ff * 1.32764712e-3f + (f * 9.67554133e-3f + 5.55071328e-2f);
  const Floats<W> y = (whole * f) * (ff * high + low) + whole;
  return x < -126.0f ? Floats<W>{} : y;
}

template <int W>
BACKPLANE_INLINE Floats<W> logistic(Floats<W> x) {
  return reciprocal<W>(1.0f + exponential<W>(-x));
}

template <int W>
BACKPLANE_INLINE Floats<W> hyperbolic_tangent(Floats<W> x) {
  // Near zero the difference in the general formula would cancel.
  const Floats<W> z = x * x;
  Floats<W> p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const Floats<W> near = p * z * x + x;
  const Floats<W> far = 1.0f - 2.0f / (exponential<W>(x + x) + 1.0f);
  return z < 0.390625f ? near : far;
}

template <int W>
BACKPLANE_INLINE Floats<W> error_function(Floats<W> x) {
  const Floats<W> magnitude = x < 0.0f ? -x : x;
  const Floats<W> t = 1.0f / (1.0f + magnitude * 0.3275911f);
  Floats<W> p = t * 1.061405429f + -1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t + -0.284496736f;
  p = p * t + 0.254829592f;
  const Floats<W> y = 1.0f - p * t * exponential<W>(-(x * x));
  return x < 0.0f ? -y : y;
}

}  // namespace backplane::cpu
