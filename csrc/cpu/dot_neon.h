// Defines what the dot kernels with NEON share. Define BACKPLANE_TARGET before including it.
#pragma once

#include <arm_neon.h>

#include "dot_products.h"

namespace backplane::cpu {
namespace {

struct Neon {
  using Int = int32x4_t;
  using Float = float32x4_t;
  template <Codes>
  using Code = int8x16_t;
  static constexpr int lanes = 4, vectors = 4, most_rows = 4, sums = 16;
  static constexpr bool signed8 = true;  // both factors of the instructions are signed
  static constexpr int32_t bias8 = 128;
  static constexpr int64_t ahead = 1024;  // a longer distance disturbs the hardware prefetcher

  static BACKPLANE_DOT uint8x16_t read(const uint8_t* from) { return vld1q_u8(from); }
  static BACKPLANE_DOT void write(uint8_t* to, int8x16_t v) { vst1q_u8(to, vreinterpretq_u8_s8(v)); }
  template <Codes C>
  static BACKPLANE_DOT int8x16_t code(uint8x16_t v) { return vreinterpretq_s8_u8(v); }
  static BACKPLANE_DOT int8x16_t low(uint8x16_t v) { return vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))); }
  static BACKPLANE_DOT int8x16_t high(uint8x16_t v) { return vreinterpretq_s8_u8(vshrq_n_u8(v, 4)); }
  static BACKPLANE_DOT Int all(int32_t v) { return vdupq_n_s32(v); }
  static BACKPLANE_DOT void keep(Int& v) { __asm__("" : "+w"(v)); }
  static BACKPLANE_DOT Int add(Int a, Int b) { return vaddq_s32(a, b); }
  static BACKPLANE_DOT Float all(float v) { return vdupq_n_f32(v); }
  static BACKPLANE_DOT Float load(const float* from) { return vld1q_f32(from); }
  static constexpr bool has_halves = true;
  static BACKPLANE_DOT Float load_halves(const uint16_t* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
  }
  static BACKPLANE_DOT void store(float* to, Float v) { vst1q_f32(to, v); }
  static BACKPLANE_DOT Float to_float(Int v) { return vcvtq_f32_s32(v); }
  static BACKPLANE_DOT Float multiply(Float a, Float b) { return vmulq_f32(a, b); }
  static BACKPLANE_DOT Float multiply_add(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
};

}  // namespace
}  // namespace backplane::cpu
