// Exponential, logistic, hyperbolic tangent and error function on vectors.
//
// Written for float32 results of networks: within a few units in the last place (the error function within 2e-7), NaN
// kept. The exponential is zero below the smallest normal number and infinite from 2^127.5.
#pragma once

#include "simd.h"

namespace backplane::cpu {

template <int W>
BACKPLANE_INLINE Floats<W> exponential(Floats<W> given) {
  constexpr float kLowest = -87.33f, kHighest = 88.8f, kRounder = 12582912.0f;  // 1.5 * 2^23: leaves the integer part
  Floats<W> x = given < kLowest ? all<W>(kLowest) : given;
  x = x > kHighest ? all<W>(kHighest) : x;
  const Floats<W> shifted = x * 1.44269504f + kRounder;
  const Floats<W> n = shifted - kRounder;
  // ln 2 in two parts, the first with few enough digits that n times it is exact.
  Floats<W> r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats<W> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Words<W> exponent = bits_as<Words<W>>(shifted) - bits_as<uint32_t>(kRounder) + 127;
  const Floats<W> y = p * bits_as<Floats<W>>(Words<W>(exponent << 23));
  return given < kLowest ? Floats<W>{} : y;
}

template <int W>
BACKPLANE_INLINE Floats<W> logistic(Floats<W> x) {
  return 1.0f / (1.0f + exponential<W>(-x));
}

template <int W>
BACKPLANE_INLINE Floats<W> hyperbolic_tangent(Floats<W> x) {
  // Near zero the difference of the general formula would cancel.
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
