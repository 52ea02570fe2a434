// Implements the dot kernels with AVX2, which has no dot-product instruction.

#if defined(__x86_64__)
#define BACKPLANE_TARGET __attribute__((target("avx2,fma,f16c")))
#include "dot_avx2.h"
#include "f16c.h"

namespace backplane::cpu {
namespace {

// maddubs adds pairs of products of unsigned and signed bytes in 16 bits, with saturation. 4-bit codes cannot saturate.
// 8-bit codes are used minus 128 with their sign moved to x, so that the sum 128 * 127 * 2 fits.
struct Signed8 {
  __m256i value, magnitude;
};

template <Codes C>
struct CodeOf {
  using type = __m256i;
};
template <>
struct CodeOf<Codes::bytes> {
  using type = Signed8;
};

struct Dots : Avx2 {
  template <Codes C>
  using Code = typename CodeOf<C>::type;
  static constexpr int most_rows = 3;
  static constexpr bool signed8 = false;
  static constexpr int32_t bias8 = 128;

  template <Codes C>
  static BACKPLANE_DOT Code<C> code(Int v) {
    if constexpr (C == Codes::bytes) {
      const Int value = _mm256_xor_si256(v, _mm256_set1_epi8(char(0x80)));
      return {value, _mm256_abs_epi8(value)};
    } else {
      return v;
    }
  }
  static BACKPLANE_DOT Int pairs(Int sum, Int products) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
  static BACKPLANE_DOT Int dot(Int sum, Signed8 code, Int x) {
    return pairs(sum, _mm256_maddubs_epi16(code.magnitude, _mm256_sign_epi8(x, code.value)));
  }
  static BACKPLANE_DOT Int dot(Int sum, Int code, Int x) { return pairs(sum, _mm256_maddubs_epi16(code, x)); }
  template <class C>
  static BACKPLANE_DOT Int dot_first(Int sum, C code, Eight x) {
    return dot(sum, code, four(x.x));
  }
  template <class C>
  static BACKPLANE_DOT Int dot_second(Int sum, C code, Eight x) {
    return dot(sum, code, four(x.x + 4));
  }
};

bool available() { return has_avx2_and_conversions(); }

}  // namespace

const DotKernels kAvx2Dots = kernels_of<Dots>("avx2", &available);

}  // namespace backplane::cpu
#endif
