// Defines vectors of W floats with the compiler's own vector types, and conversions from and to narrower formats.
//
// All functions are always inlined, so each is compiled with the instruction set of its caller; one build holds every
// variant, and the caller is chosen at run time (isa.h).
//
// Use a comparison of vectors only as the condition of `a < b ? x : y`. Stored as a value it is a vector of integers,
// which AVX-512 has no instruction for and GCC computes one element at a time.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

#define BACKPLANE_INLINE inline __attribute__((always_inline))

namespace backplane::cpu {

enum class Half16 { bfloat, ieee };

template <int W>
using Floats __attribute__((vector_size(W * 4))) = float;
template <int W>
using Words __attribute__((vector_size(W * 4))) = uint32_t;
template <int W>
using Ints __attribute__((vector_size(W * 4))) = int32_t;
template <int W>
using Shorts __attribute__((vector_size(W * 2))) = uint16_t;
template <int W>
using Longs __attribute__((vector_size(W * 8))) = uint64_t;

template <class To, class From>
BACKPLANE_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <int W>
BACKPLANE_INLINE Floats<W> all(float value) {
  return Floats<W>{} + value;
}

template <int W>
BACKPLANE_INLINE Floats<W> load(const float* from) {
  Floats<W> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <int W>
BACKPLANE_INLINE void store(float* to, Floats<W> v) {
  std::memcpy(to, &v, sizeof v);
}

// Computes sum + vector * factors[Lane]. On ARM the instruction takes the factor from any lane; without the intrinsic,
// GCC moves the factors into general registers one by one.
#if defined(__aarch64__)
using Factors = float32x4_t;
BACKPLANE_INLINE Factors load_factors(const float* from) { return vld1q_f32(from); }
template <int Lane>
BACKPLANE_INLINE Floats<4> add_product(Floats<4> sum, Floats<4> vector, Factors factors) {
  return bits_as<Floats<4>>(vfmaq_laneq_f32(bits_as<float32x4_t>(sum), bits_as<float32x4_t>(vector), factors, Lane));
}
constexpr bool kHasFactors = true;
#else
using Factors = Floats<4>;  // declared only, never used
Factors load_factors(const float* from);
template <int Lane, class Vector>
Vector add_product(Vector sum, Vector vector, Factors factors);
constexpr bool kHasFactors = false;
#endif

// Converts IEEE half to float without conversion instructions: shift exponent and mantissa into place and rescale,
// which also normalizes subnormals. An all-ones exponent (infinity, NaN) must stay all ones.
constexpr uint32_t kHalfSpecial = 0x0f800000, kFloatSpecial = 0x7f800000;
constexpr float kHalfRescale = 0x1p112f;

template <int W>
BACKPLANE_INLINE Floats<W> widen_ieee(Words<W> bits) {
#if defined(__aarch64__)
  if constexpr (W == 4)  // every 64-bit ARM processor has the conversion instruction
    return bits_as<Floats<W>>(vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(bits_as<uint32x4_t>(bits)))));
#endif
  const Words<W> magnitude = (bits & 0x7fff) << 13;
  Words<W> wide = bits_as<Words<W>>(Floats<W>(bits_as<Floats<W>>(magnitude) * kHalfRescale));
  wide = magnitude >= kHalfSpecial ? wide | kFloatSpecial : wide;
  wide |= (bits & 0x8000) << 16;
  return bits_as<Floats<W>>(wide);
}

template <int W, Half16 F>
BACKPLANE_INLINE Floats<W> widen(Shorts<W> narrow) {
#if defined(__aarch64__)
  // One instruction each, which GCC does not generate by itself.
  if constexpr (W == 4) {
    if constexpr (F == Half16::ieee) return bits_as<Floats<W>>(vcvt_f32_f16(bits_as<float16x4_t>(narrow)));
    else return bits_as<Floats<W>>(vshll_n_u16(bits_as<uint16x4_t>(narrow), 16));
  }
#endif
  const Words<W> bits = __builtin_convertvector(narrow, Words<W>);
  if constexpr (F == Half16::bfloat) return bits_as<Floats<W>>(Words<W>(bits << 16));
  return widen_ieee<W>(bits);
}

template <int W, Half16 F>
BACKPLANE_INLINE Floats<W> widen(const uint16_t* from) {
  Shorts<W> narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  return widen<W, F>(narrow);
}

template <Half16 F>
BACKPLANE_INLINE float widen_one(uint16_t bits) {
  const uint16_t four[4] = {bits, 0, 0, 0};
  return widen<4, F>(four)[0];
}

// Rounds to the nearest, ties to even. The carry of the addition may reach the exponent, which is right when rounding
// up to the next power of two or to infinity; a NaN would change and is restored.
template <int W>
BACKPLANE_INLINE Shorts<W> to_bfloat(Floats<W> v) {
  const Words<W> bits = bits_as<Words<W>>(v);
  const Words<W> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words<W> result = v != v ? Words<W>{} + 0x7fc0 : rounded;
#if defined(__aarch64__)
  if constexpr (W == 4) return bits_as<Shorts<W>>(vmovn_u32(bits_as<uint32x4_t>(result)));
#endif
  return __builtin_convertvector(result, Shorts<W>);
}

// The same for IEEE half, whose exponent is narrower. Below its normal range a float addition does the rounding, with a
// number so large that the last kept bit is the half's; from 2^16 on all values become infinite.
template <int W>
BACKPLANE_INLINE Shorts<W> to_half(Floats<W> v) {
#if defined(__aarch64__)
  if constexpr (W == 4) return bits_as<Shorts<W>>(vcvt_f16_f32(bits_as<float32x4_t>(v)));
#endif
  constexpr uint32_t kRebias = uint32_t(15 - 127) << 23, kSmallestNormal = 0x38800000, kTooLarge = 0x47800000;
  const Words<W> bits = bits_as<Words<W>>(v);
  const Words<W> magnitude = bits & 0x7fffffff;
  const Floats<W> small = bits_as<Floats<W>>(magnitude) + 0.5f;
  const Words<W> subnormal = bits_as<Words<W>>(small) - 0x3f000000;
  const Words<W> normal = (magnitude + kRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  Words<W> half = magnitude < kSmallestNormal ? subnormal : normal;
  half = magnitude >= kTooLarge ? Words<W>{} + 0x7c00 : half;
  half = v != v ? Words<W>{} + 0x7e00 : half;
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000), Shorts<W>);
}

// Reads elements of a tensor as floats.
template <int W>
BACKPLANE_INLINE Floats<W> read(const float* from) {
  return load<W>(from);
}
template <int W>
BACKPLANE_INLINE Floats<W> read(const c10::BFloat16* from) {
  return widen<W, Half16::bfloat>(reinterpret_cast<const uint16_t*>(from));
}
template <int W>
BACKPLANE_INLINE Floats<W> read(const c10::Half* from) {
  return widen<W, Half16::ieee>(reinterpret_cast<const uint16_t*>(from));
}

// Describes how a type is stored: narrow<W>(floats) returns the vector of its bits.
template <class T>
struct Format;
template <>
struct Format<float> {
  template <int W>
  static BACKPLANE_INLINE Floats<W> narrow(Floats<W> v) {
    return v;
  }
};
template <>
struct Format<c10::BFloat16> {
  template <int W>
  static BACKPLANE_INLINE Shorts<W> narrow(Floats<W> v) {
    return to_bfloat<W>(v);
  }
};
template <>
struct Format<c10::Half> {
  template <int W>
  static BACKPLANE_INLINE Shorts<W> narrow(Floats<W> v) {
    return to_half<W>(v);
  }
};

template <int W, class T>
BACKPLANE_INLINE void write(T* to, Floats<W> v) {
  const auto narrow = Format<T>::template narrow<W>(v);
  static_assert(sizeof narrow == W * sizeof(T));
  std::memcpy(static_cast<void*>(to), &narrow, sizeof narrow);
}

// Reads fewer than W elements, at the end of a row; the missing ones are zero.
template <int W, class T>
BACKPLANE_INLINE Floats<W> read_some(const T* from, int64_t count) {
  T padded[W] = {};
  std::memcpy(static_cast<void*>(padded), from, count * sizeof(T));
  return read<W>(padded);
}
template <int W, class T>
BACKPLANE_INLINE void write_some(T* to, Floats<W> v, int64_t count) {
  const auto narrow = Format<T>::template narrow<W>(v);
  std::memcpy(static_cast<void*>(to), &narrow, count * sizeof(T));
}

// Returns the value of a number after storing it as T and reading it back.
template <int W, class T>
BACKPLANE_INLINE Floats<W> rounded_to(Floats<W> v) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) return widen<W, Half16::bfloat>(to_bfloat<W>(v));
  if constexpr (std::is_same_v<T, c10::Half>) return widen<W, Half16::ieee>(to_half<W>(v));
  return v;
}

template <int W>
BACKPLANE_INLINE Floats<W> larger(Floats<W> a, Floats<W> b) {
  return a > b ? a : b;
}

template <int W>
BACKPLANE_INLINE Floats<4> folded(Floats<W> v) {
  if constexpr (W == 4) {
    return v;
  } else {
    Floats<W / 2> half[2];
    std::memcpy(half, &v, sizeof v);
    return folded<W / 2>(half[0] + half[1]);
  }
}

template <int W>
BACKPLANE_INLINE float sum(Floats<W> v) {
  const Floats<4> four = folded<W>(v);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

template <int W>
BACKPLANE_INLINE float largest(Floats<W> v) {
  if constexpr (W > 4) {
    Floats<W / 2> half[2];
    std::memcpy(half, &v, sizeof v);
    return largest<W / 2>(larger<W / 2>(half[0], half[1]));
  } else {
    const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
  }
}

}  // namespace backplane::cpu
