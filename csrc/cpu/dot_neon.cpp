// Implements the dot kernels with the base NEON of every 64-bit ARM processor.

#if defined(__aarch64__)
#define BACKPLANE_TARGET
#include "dot_neon.h"

namespace backplane::cpu {
namespace {

struct Dots : Neon {
  struct Eight {
    int8x16_t first, second;
  };

  static BACKPLANE_DOT int8x16_t four(const int8_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return vreinterpretq_s8_s32(vdupq_n_s32(bits));
  }
  static BACKPLANE_DOT Eight eight(const int8_t* x) { return {four(x), four(x + 4)}; }
  // The product of two bytes fits 16 bits; the sum of two such products may not.
  static BACKPLANE_DOT Int dot(Int sum, int8x16_t code, int8x16_t x) {
    const int32x4_t left = vpaddlq_s16(vmull_s8(vget_low_s8(code), vget_low_s8(x)));
    const int32x4_t right = vpaddlq_s16(vmull_high_s8(code, x));
    return vaddq_s32(sum, vpaddq_s32(left, right));
  }
  static BACKPLANE_DOT Int dot_first(Int sum, int8x16_t code, Eight x) { return dot(sum, code, x.first); }
  static BACKPLANE_DOT Int dot_second(Int sum, int8x16_t code, Eight x) { return dot(sum, code, x.second); }
};

bool available() { return true; }

}  // namespace

const DotKernels kNeonDots = kernels_of<Dots>("neon", &available);

}  // namespace backplane::cpu
#endif
