// Implements the dot kernels for many rows with the 8-bit matrix instruction of ARMv8.6 (SMMLA); few rows use those of
// dotprod.
//
// SMMLA multiplies two rows of x by two output features, eight positions each, and accumulates into four sums: twice
// the work of SDOT. Six rows by sixteen features need 24 registers for sums, three for x and two for codes, 29 of 32,
// and do 24 multiplications for 11 operands. Four rows by sixteen features would do 16 for 10, eight by eight 16 for 8.
//
// Codes lie in memory as for dotprod; one ZIP per vector brings them into the order of the instruction when they are
// widened. Two rows of x are combined where they are used. Loads of sixteen positions with ZIPs would save three of 14
// loads per step for as many vector instructions; but they would take all registers, and a group may end with eight
// positions.
//
// Written without access to a processor that has the instruction: tested under an emulator, never measured.

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__clang__)
#define BACKPLANE_TARGET __attribute__((target("dotprod,i8mm")))
#else
#define BACKPLANE_TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#endif
#include "dot_neon.h"

namespace backplane::cpu {
namespace {

constexpr int kWidth = Neon::vectors * Neon::lanes, kFeaturePairs = kWidth / 2, kMostRows = 6;

// Widens codes in the order of the instruction: eight positions of features 0 and 1, of 2 and 3, and so on.
template <Codes C>
BACKPLANE_TARGET void widen_pairs(const uint8_t* codes, int64_t groups, int64_t group, uint8_t* to) {
  constexpr int half = kWidth * 4;  // bytes of four positions
  for (int64_t i = 0; i < groups * group; i += 8) {
    repeat<Neon::vectors>(BACKPLANE_DO(v) {
      int8x16_t first, second;  // four positions of four features, and the next four
      if constexpr (C == Codes::nibbles) {
        const uint8x16_t both = Neon::read(codes + v * 16);
        first = Neon::low(both);
        second = Neon::high(both);
      } else {
        first = Neon::code<C>(Neon::read(codes + v * 16));
        second = Neon::code<C>(Neon::read(codes + half + v * 16));
      }
      const int32x4_t left = vreinterpretq_s32_s8(first), right = vreinterpretq_s32_s8(second);
      Neon::write(to + v * 32, vreinterpretq_s8_s32(vzip1q_s32(left, right)));
      Neon::write(to + v * 32 + 16, vreinterpretq_s8_s32(vzip2q_s32(left, right)));
    });
    codes += C == Codes::nibbles ? half : 2 * half;
    to += 2 * half;
  }
}

// Converts between the order of the instruction, two rows of two features each, and two rows of a tile, four features
// each.
BACKPLANE_DOT void exchange(float32x4_t& a, float32x4_t& b) {
  const float64x2_t left = vreinterpretq_f64_f32(a), right = vreinterpretq_f64_f32(b);
  a = vreinterpretq_f32_f64(vzip1q_f64(left, right));
  b = vreinterpretq_f32_f64(vzip2q_f64(left, right));
}

// of_features() repeats the numbers of two features for both rows; of_rows() repeats those of two rows for both
// features.
BACKPLANE_DOT float32x4_t of_features(const float* two) {
  const float32x2_t both = vld1_f32(two);
  return vcombine_f32(both, both);
}
BACKPLANE_DOT float32x4_t of_rows(const float* a, const float* b) {
  return vcombine_f32(vld1_dup_f32(a), vld1_dup_f32(b));
}
BACKPLANE_DOT int32x4_t of_rows(const int32_t* a, const int32_t* b) {
  return vcombine_s32(vld1_dup_s32(a), vld1_dup_s32(b));
}

// Returns `codes`, and keeps the compiler from reading them before a and b are computed.
BACKPLANE_DOT const uint8_t* after(int32x4_t a, int32x4_t b, const uint8_t* codes) {
  __asm__("" : "+r"(codes) : "w"(a), "w"(b));
  return codes;
}

// Magic number for integer-to-float conversion: its lowest mantissa bits count integers, so sums that start with its
// bits become floats by a subtraction. LLVM's model of Neoverse N2 does four subtractions in the time of one
// conversion. The sums must stay within 2^22.
constexpr float kCounter = 0x1.8p23f;
constexpr int64_t kCounted = 128;  // positions
static_assert(kCounted * 127 * 255 < 1 << 22);

// Computes pairs of rows, the last perhaps a single row, times one block. Float sums stay in memory, in the order of
// the instruction, because the registers hold the integer sums.
template <int Pairs, bool Counted>
class Block {
 public:
  BACKPLANE_DOT explicit Block(const Product& p) : p_(p) {
    each_four(BACKPLANE_DO(i) {
      constexpr int pair = i / kQuads, column = i % kQuads * 4;
      float32x4_t a = vdupq_n_f32(0.0f), b = a;
      if (p.more) {
        a = vld1q_f32(p.tile + 2 * pair * kWidth + column);
        b = vld1q_f32(p.tile + second(pair) * kWidth + column);
        exchange(a, b);
      }
      vst1q_f32(sums_ + i * 8, a);
      vst1q_f32(sums_ + i * 8 + 4, b);
    });
  }

  BACKPLANE_DOT void run() {
    const uint8_t *codes = p_.codes, *ahead = p_.ahead;
    const int8_t* x = p_.x;
    const int32x4_t start = Counted ? vreinterpretq_s32_f32(vdupq_n_f32(kCounter)) : vdupq_n_s32(0);
    for (int64_t g = 0; g < p_.groups; ++g) {
      if (ahead != nullptr)
        for (const uint8_t* end = ahead + p_.ahead_bytes; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
      int32x4_t dots[kSums];
      repeat<kSums>(BACKPLANE_DO(i) { dots[i] = start; });
      if (p_.correction != 0)
        repeat<Pairs>(BACKPLANE_DO(pair) {
          const int64_t a = 2 * pair * p_.x_groups + g, b = second(pair) * p_.x_groups + g;
          const int32x4_t corrected = vmlaq_n_s32(start, of_rows(p_.x_sums + a, p_.x_sums + b), p_.correction);
          repeat<kFeaturePairs>(BACKPLANE_DO(f) { dots[pair * kFeaturePairs + f] = corrected; });
        });
      for (int64_t i = 0; i < p_.group; i += 8) {
        eight(codes, x, dots);
        x += 8;
      }
      p_.offsets != nullptr ? add_group<true>(g, dots) : add_group<false>(g, dots);
      __asm__("" : "+m"(sums_));  // else the compiler keeps them in registers and spills around every loop
    }
    each_four(BACKPLANE_DO(i) {
      constexpr int pair = i / kQuads, column = i % kQuads * 4;
      float32x4_t a = vld1q_f32(sums_ + i * 8), b = vld1q_f32(sums_ + i * 8 + 4);
      exchange(a, b);
      vst1q_f32(p_.tile + 2 * pair * kWidth + column, a);
      if (2 * pair + 1 < p_.rows) vst1q_f32(p_.tile + (2 * pair + 1) * kWidth + column, b);
    });
  }

 private:
  static constexpr int kSums = Pairs * kFeaturePairs, kQuads = kWidth / 4;

  template <class F>
  static BACKPLANE_DOT void each_four(const F& f) {
    repeat<Pairs * kQuads>(f);
  }

  // With an odd number of rows, the last row is used twice.
  BACKPLANE_DOT int64_t second(int pair) const { return pair + 1 == Pairs ? p_.rows - 1 : 2 * pair + 1; }

  // Accumulates eight positions.
  BACKPLANE_DOT void eight(const uint8_t*& codes, const int8_t* x, int32x4_t* dots) const {
    int8x16_t rows[Pairs];
    repeat<Pairs>(BACKPLANE_DO(pair) {
      rows[pair] = vcombine_s8(vld1_s8(x + 2 * pair * p_.x_stride), vld1_s8(x + second(pair) * p_.x_stride));
    });
    repeat<kFeaturePairs / 2>(BACKPLANE_DO(f) {
      const int8x16_t left = vreinterpretq_s8_u8(vld1q_u8(codes + f * 32));
      const int8x16_t right = vreinterpretq_s8_u8(vld1q_u8(codes + f * 32 + 16));
      repeat<Pairs>(BACKPLANE_DO(pair) {
        int32x4_t* to = dots + pair * kFeaturePairs + f * 2;
        to[0] = vmmlaq_s32(to[0], rows[pair], left);
        to[1] = vmmlaq_s32(to[1], rows[pair], right);
        // GCC would load all features of the step first, and spill sums to free the registers.
        codes = after(to[0], to[1], codes);
      });
    });
    codes += kFeaturePairs * 16;
  }

  template <bool Offsets>
  BACKPLANE_DOT void add_group(int64_t g, const int32x4_t* dots) {
    const float* scales = p_.scales + g * kWidth;
    float32x4_t x_scales[Pairs], totals[Pairs];
    repeat<Pairs>(BACKPLANE_DO(pair) {
      const int64_t a = 2 * pair * p_.x_groups + g, b = second(pair) * p_.x_groups + g;
      x_scales[pair] = of_rows(p_.x_scales + a, p_.x_scales + b);
      if constexpr (Offsets)
        totals[pair] = vmulq_f32(x_scales[pair], vcvtq_f32_s32(of_rows(p_.x_sums + a, p_.x_sums + b)));
    });
    repeat<kFeaturePairs>(BACKPLANE_DO(f) {
      const float32x4_t scale = of_features(scales + f * 2);
      float32x4_t offset = scale;
      if constexpr (Offsets) offset = of_features(p_.offsets + g * kWidth + f * 2);
      repeat<Pairs>(BACKPLANE_DO(pair) {
        constexpr int at = pair * kFeaturePairs + f;
        const float32x4_t dot = Counted ? vsubq_f32(vreinterpretq_f32_s32(dots[at]), vdupq_n_f32(kCounter))
                                        : vcvtq_f32_s32(dots[at]);
        float32x4_t sum = vfmaq_f32(vld1q_f32(sums_ + at * 4), vmulq_f32(dot, scale), x_scales[pair]);
        if constexpr (Offsets) sum = vfmaq_f32(sum, offset, totals[pair]);
        vst1q_f32(sums_ + at * 4, sum);
      });
    });
  }

  const Product p_;  // a copy: the compiler must assume that stores may alias the caller's
  float sums_[kSums * 4];
};

template <int Pairs, bool Counted>
__attribute__((noinline)) BACKPLANE_TARGET void multiply_pairs(const Product& p) {
  Block<Pairs, Counted>(p).run();
}

template <bool Counted>
void multiply_by_rows(const Product& p) {
  (p.rows > 4 ? multiply_pairs<3, Counted> : p.rows > 2 ? multiply_pairs<2, Counted> : multiply_pairs<1, Counted>)(p);
}

void multiply_wide(const Product& p) { p.group <= kCounted ? multiply_by_rows<true>(p) : multiply_by_rows<false>(p); }

BACKPLANE_TARGET int64_t spin_pairs(int64_t rounds) {
  constexpr int count = kMostRows / 2 * kFeaturePairs;
  const int8x16_t zeros = vdupq_n_s8(0), ones = vdupq_n_s8(1);
  int32x4_t dots[count];
  repeat<count>(BACKPLANE_DO(i) { dots[i] = vdupq_n_s32(i); });
  for (int64_t round = 0; round < rounds; ++round) {
    repeat<count>(BACKPLANE_DO(i) { dots[i] = vmmlaq_s32(dots[i], ones, zeros); });
    // Zeros leave the sums unchanged; keep() hides that from the compiler.
    repeat<count>(BACKPLANE_DO(i) { Neon::keep(dots[i]); });
  }
  repeat<count - 1>(BACKPLANE_DO(i) { dots[0] = vaddq_s32(dots[0], dots[i + 1]); });
  volatile int32_t sink = vgetq_lane_s32(dots[0], 0);
  (void)sink;
  return rounds * count * 32;
}

bool available() {
#if defined(__linux__)
  return kDotprodDots.available() && (getauxval(AT_HWCAP2) & (1UL << 13)) != 0;  // HWCAP2_I8MM
#else
  return false;  // not every processor with dot-product instructions has it
#endif
}

DotKernels kernels() {
  DotKernels result = kDotprodDots;
  result.name = "i8mm";
  result.available = &available;
  result.many_rows = kMostRows;
  result.row_multiple = 2;  // parts have an even number of rows; rows past the end are not read
  result.many_from = 5;  // from the count of instructions, widening included
  result.widen8 = &widen_pairs<Codes::bytes>;
  result.widen4 = &widen_pairs<Codes::nibbles>;
  result.widen4_centred = nullptr;
  result.counter = 0;
  result.multiply_wide = &multiply_wide;
  result.wide_bias8 = Neon::bias8;
  result.wide_bias4 = 0;
  result.spin = &spin_pairs;
  return result;
}

}  // namespace

const DotKernels& i8mm_dots() {
  static const DotKernels result = kernels();
  return result;
}

}  // namespace backplane::cpu
#endif
