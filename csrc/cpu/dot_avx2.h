// Defines what the dot kernels with 256-bit vectors share (AVX2 and AVX-VNNI). Define BACKPLANE_TARGET before including
// it.
#pragma once

#include <immintrin.h>

#include "dot_products.h"

namespace backplane::cpu {
namespace {

struct Avx2 {
  using Int = __m256i;
  using Float = __m256;
  struct Eight {
    const int8_t* x;
  };
  static constexpr int lanes = 8, vectors = 2, sums = 8;
  static constexpr int64_t ahead = 4096;

  static BACKPLANE_DOT Int read(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static BACKPLANE_DOT void write(uint8_t* to, Int v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
  static BACKPLANE_DOT Int low(Int v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static BACKPLANE_DOT Int high(Int v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
  static BACKPLANE_DOT Eight eight(const int8_t* x) { return {x}; }
  static BACKPLANE_DOT Int four(const int8_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return _mm256_set1_epi32(bits);
  }
  static BACKPLANE_DOT Int all(int32_t v) { return _mm256_set1_epi32(v); }
  static BACKPLANE_DOT void keep(Int& v) { __asm__("" : "+x"(v)); }
  static BACKPLANE_DOT Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static BACKPLANE_DOT Float all(float v) { return _mm256_set1_ps(v); }
  static BACKPLANE_DOT Float load(const float* from) { return _mm256_loadu_ps(from); }
  static constexpr bool has_halves = true;
  static BACKPLANE_DOT Float load_halves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static BACKPLANE_DOT void store(float* to, Float v) { _mm256_storeu_ps(to, v); }
  static BACKPLANE_DOT Float to_float(Int v) { return _mm256_cvtepi32_ps(v); }
  static BACKPLANE_DOT Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static BACKPLANE_DOT Float multiply_add(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace backplane::cpu
