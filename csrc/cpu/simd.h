// Vectors of W floats as the compiler's own vector types, and 16-bit formats widened into them.
//
// Functions are always inlined, so each is compiled with the instruction set of the function that calls it; one build
// holds every variant and the caller is chosen at run time.
#pragma once

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
using Shorts __attribute__((vector_size(W * 2))) = uint16_t;

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

// IEEE half to float without conversion instructions: shift exponent and mantissa into place and rescale, which also
// normalises subnormals; an all-ones exponent (infinity, NaN) must stay all ones.
constexpr uint32_t kHalfSpecial = 0x0f800000, kFloatSpecial = 0x7f800000;
constexpr float kHalfRescale = 0x1p112f;

template <int W, Half16 F>
BACKPLANE_INLINE Floats<W> widen(const uint16_t* from) {
  Shorts<W> narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  const Words<W> bits = __builtin_convertvector(narrow, Words<W>);
  Words<W> wide;
  Floats<W> value;
  if constexpr (F == Half16::bfloat) {
    wide = bits << 16;
  } else {
    const Words<W> magnitude = (bits & 0x7fff) << 13;
    std::memcpy(&value, &magnitude, sizeof value);
    value *= kHalfRescale;
    std::memcpy(&wide, &value, sizeof wide);
    wide |= static_cast<Words<W>>(magnitude >= kHalfSpecial) & kFloatSpecial;
    wide |= (bits & 0x8000) << 16;
  }
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <Half16 F>
BACKPLANE_INLINE float widen_one(uint16_t bits) {
  const uint16_t four[4] = {bits, 0, 0, 0};
  return widen<4, F>(four)[0];
}

}  // namespace backplane::cpu
