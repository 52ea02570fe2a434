// Implements the dot kernels with AVX-512 VNNI: one instruction multiplies four unsigned by four signed bytes in each
// of 16 lanes and accumulates.

#if defined(__x86_64__)
#include <immintrin.h>

#define BACKPLANE_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")))
#include "dot_products.h"
#include "f16c.h"

namespace backplane::cpu {
namespace {

struct Avx512Vnni {
  using Int = __m512i;
  using Float = __m512;
  template <Codes>
  using Code = __m512i;
  struct Eight {
    const int8_t* x;
  };
  static constexpr int lanes = 16, vectors = 2, most_rows = 6, sums = 12;
  static constexpr bool signed8 = false;
  static constexpr int32_t bias8 = 0;
  static constexpr int64_t ahead = 4096;

  static BACKPLANE_DOT Int read(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static BACKPLANE_DOT void write(uint8_t* to, Int v) { _mm512_storeu_si512(to, v); }
  template <Codes>
  static BACKPLANE_DOT Int code(Int v) {
    return v;
  }
  static BACKPLANE_DOT Int low(Int v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static BACKPLANE_DOT Int high(Int v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
  static BACKPLANE_DOT Eight eight(const int8_t* x) { return {x}; }
  static BACKPLANE_DOT Int four(const int8_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  static BACKPLANE_DOT Int dot_first(Int sum, Int code, Eight x) { return _mm512_dpbusd_epi32(sum, code, four(x.x)); }
  static BACKPLANE_DOT Int dot_second(Int sum, Int code, Eight x) {
    return _mm512_dpbusd_epi32(sum, code, four(x.x + 4));
  }
  static BACKPLANE_DOT Int all(int32_t v) { return _mm512_set1_epi32(v); }
  static BACKPLANE_DOT void keep(Int& v) { __asm__("" : "+v"(v)); }
  static BACKPLANE_DOT Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static BACKPLANE_DOT Float all(float v) { return _mm512_set1_ps(v); }
  static BACKPLANE_DOT Float load(const float* from) { return _mm512_loadu_ps(from); }
  static constexpr bool has_halves = true;
  static BACKPLANE_DOT Float load_halves(const uint16_t* from) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static BACKPLANE_DOT void store(float* to, Float v) { _mm512_storeu_ps(to, v); }
  // Written without _mm512_cvtepi32_ps, because GCC 12 warns wherever it is used.
  static BACKPLANE_DOT Float to_float(Int v) { return __builtin_convertvector((__v16si)v, __v16sf); }
  static BACKPLANE_DOT Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static BACKPLANE_DOT Float multiply_add(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
};

bool available() {
  return has_avx2_and_conversions() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const DotKernels kAvx512VnniDots = kernels_of<Avx512Vnni>("avx512-vnni", &available);

}  // namespace backplane::cpu
#endif
