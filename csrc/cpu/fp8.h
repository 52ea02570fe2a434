// Converts to 8-bit floats with saturation, and from them with a table of their 256 numbers.
#pragma once

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include <array>

#include "simd.h"

namespace backplane::cpu {

template <int W>
using Bytes __attribute__((vector_size(W))) = uint8_t;

// The exponent bias, mantissa bits and largest finite number of a format.
template <class T>
struct Fp8;
template <>
struct Fp8<c10::Float8_e4m3fn> {
  static constexpr int bias = 7, mantissa = 3;
  static constexpr float largest = 448.0f;
};
template <>
struct Fp8<c10::Float8_e5m2> {
  static constexpr int bias = 15, mantissa = 2;
  static constexpr float largest = 57344.0f;
};

// Rounds to the nearest, ties to even, with saturation; NaN stays NaN. As in to_half, a float addition does the
// rounding below the format's normal range.
template <int W, class T>
BACKPLANE_INLINE Bytes<W> to_fp8(Floats<W> v) {
  constexpr int kShift = 23 - Fp8<T>::mantissa;
  constexpr float kLargest = Fp8<T>::largest;
  constexpr uint32_t kSmallestNormal = uint32_t(127 + 1 - Fp8<T>::bias) << 23;
  constexpr uint32_t kRounder = uint32_t(127 + 23 + 1 - Fp8<T>::bias - Fp8<T>::mantissa) << 23;
  const Words<W> sign = (bits_as<Words<W>>(v) >> 24) & 0x80;
  Floats<W> cut = v > kLargest ? all<W>(kLargest) : v;
  cut = cut < -kLargest ? all<W>(-kLargest) : cut;
  const Words<W> magnitude = bits_as<Words<W>>(cut) & 0x7fffffff;
  const Floats<W> rounder = bits_as<Floats<W>>(Words<W>(Words<W>{} + kRounder));
  const Words<W> subnormal = bits_as<Words<W>>(Floats<W>(bits_as<Floats<W>>(magnitude) + rounder)) - kRounder;
  const Words<W> odd = (magnitude >> kShift) & 1;
  const Words<W> normal =
      ((magnitude + ((1u << (kShift - 1)) - 1) + odd) >> kShift) - (uint32_t(127 - Fp8<T>::bias) << Fp8<T>::mantissa);
  const Words<W> code = magnitude < kSmallestNormal ? subnormal : normal;
  return __builtin_convertvector((v != v ? Words<W>{} + 0x7f : code) | sign, Bytes<W>);
}

template <class T>
const std::array<float, 256>& fp8_numbers() {
  static const std::array<float, 256> numbers = [] {
    std::array<float, 256> all;
    for (int code = 0; code < 256; ++code)
      all[code] = static_cast<float>(T(static_cast<uint8_t>(code), T::from_bits()));
    return all;
  }();
  return numbers;
}

template <>
struct Format<c10::Float8_e4m3fn> {
  template <int W>
  static BACKPLANE_INLINE Bytes<W> narrow(Floats<W> v) {
    return to_fp8<W, c10::Float8_e4m3fn>(v);
  }
};
template <>
struct Format<c10::Float8_e5m2> {
  template <int W>
  static BACKPLANE_INLINE Bytes<W> narrow(Floats<W> v) {
    return to_fp8<W, c10::Float8_e5m2>(v);
  }
};

}  // namespace backplane::cpu
