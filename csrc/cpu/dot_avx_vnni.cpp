// Implements the dot kernels with AVX-VNNI: the instruction of AVX-512 VNNI on 256-bit vectors, for processors without
// AVX-512.

#if defined(__x86_64__)
#include <cpuid.h>

#define BACKPLANE_TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#include "dot_avx2.h"
#include "f16c.h"

namespace backplane::cpu {
namespace {

struct Dots : Avx2 {
  template <Codes>
  using Code = Int;
  static constexpr int most_rows = 4;
  static constexpr bool signed8 = false;
  static constexpr int32_t bias8 = 0;

  template <Codes>
  static BACKPLANE_DOT Int code(Int v) {
    return v;
  }
  static BACKPLANE_DOT Int dot_first(Int sum, Int code, Eight x) {
    return _mm256_dpbusd_avx_epi32(sum, code, four(x.x));
  }
  static BACKPLANE_DOT Int dot_second(Int sum, Int code, Eight x) {
    return _mm256_dpbusd_avx_epi32(sum, code, four(x.x + 4));
  }
};

bool available() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2_and_conversions() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4)) != 0;
}

}  // namespace

const DotKernels kAvxVnniDots = kernels_of<Dots>("avx-vnni", &available);

}  // namespace backplane::cpu
#endif
