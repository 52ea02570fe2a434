// Products with the dot-product instructions of ARMv8.2, which most servers' processors have.

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__clang__)
#define BACKPLANE_TARGET __attribute__((target("dotprod")))
#else
#define BACKPLANE_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#include "dot_neon.h"

namespace backplane::cpu {
namespace {

struct Dots : Neon {
  using Eight = int8x8_t;

  // Eight positions of x are one register, and the instruction picks four of them: no copies to all lanes.
  static BACKPLANE_DOT Eight eight(const int8_t* x) { return vld1_s8(x); }
  static BACKPLANE_DOT Int dot_first(Int sum, int8x16_t code, Eight x) { return vdotq_lane_s32(sum, code, x, 0); }
  static BACKPLANE_DOT Int dot_second(Int sum, int8x16_t code, Eight x) { return vdotq_lane_s32(sum, code, x, 1); }
};

bool available() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & (1UL << 20)) != 0;  // HWCAP_ASIMDDP
#else
  return true;  // every other system with these processors has them
#endif
}

constexpr DotKernels kernels() {
  DotKernels result = kernels_of<Dots>("dotprod", &available);
  result.widen8 = &widen<Dots, Codes::bytes>;
  return result;
}

}  // namespace

const DotKernels kDotprodDots = kernels();

}  // namespace backplane::cpu
#endif
