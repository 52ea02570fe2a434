// Multiplies by GGUF blocks as they lie in the file, with the dot-product instructions of ARMv8.2.
//
// gguf_layouts.py builds this file and compares `quantized_linear` with it; it is not used for serving. The input is
// rounded as in csrc/cpu/quantize_rows.cpp, so results agree up to float32 rounding. Four rows of x share the decoding
// of a block. Types with one scale per block are processed four features at a time: x is loaded once for them, and
// their sums become one vector. A block of the K-types has so many groups that their sums fill vectors.

#include <arm_neon.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kAhead = 2048;  // prefetch distance in bytes
constexpr float kSmallest = 0x1p-100f;
constexpr float kToInteger = 0x1.8p23f;
constexpr int32_t kToIntegerBits = 0x4b400000;

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

// Rows of x in 8 bits, with one scale per group.
struct Input {
  int64_t groups, stride;
  int8_t* codes;
  float *scales, *counted;  // counted: scale * sum of codes, which an offset is multiplied by
  int32_t* biases;          // added to sums of products: minus the sum of codes times the zero point
};

template <int Group>
void round_rows(const float* x, int64_t rows, int64_t k, int32_t zero, const Input& to) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t g = 0; g < to.groups; ++g) {
      const float* from = x + row * k + g * Group;
      int8_t* codes = to.codes + row * to.stride + g * Group;
      float32x4_t values[Group / 4], largest = vdupq_n_f32(0.0f);
      for (int v = 0; v < Group / 4; ++v) {
        values[v] = vld1q_f32(from + v * 4);
        largest = vmaxq_f32(largest, vabsq_f32(values[v]));
      }
      const float amax = vmaxvq_f32(largest), inverse = amax < kSmallest ? 0.0f : 127.0f / amax;
      int32x4_t total = vdupq_n_s32(0);
      for (int s = 0; s < Group / 16; ++s) {
        int16x8_t words[4];
        for (int v = 0; v < 4; ++v)
          words[v] = vreinterpretq_s16_s32(vcvtnq_s32_f32(vmulq_n_f32(values[s * 4 + v], inverse)));
        const int8x16_t low = vreinterpretq_s8_s16(vuzp1q_s16(words[0], words[1]));
        const int8x16_t high = vreinterpretq_s8_s16(vuzp1q_s16(words[2], words[3]));
        const int8x16_t made = vuzp1q_s8(low, high);
        vst1q_s8(codes + s * 16, made);
        total = vdotq_s32(total, made, vdupq_n_s8(1));
      }
      const int32_t sum = vaddvq_s32(total);
      const float scale = amax / 127.0f;
      to.scales[row * to.groups + g] = scale;
      to.counted[row * to.groups + g] = scale * float(sum);
      to.biases[row * to.groups + g] = kToIntegerBits - zero * sum;
    }
}

INLINE uint64_t half_at(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return bits;
}

INLINE float number_at(const uint8_t* from) {
  __fp16 value;
  std::memcpy(&value, from, 2);
  return value;
}

INLINE int32x4_t totals(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
  return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}

// The asm keeps the compiler from copying a zero from another register: setting it anew uses less of the vector units.
INLINE int32x4_t dot(int8x16_t a, int8x16_t x) {
  int32x4_t zero;
  __asm__ volatile("movi %0.4s, #0" : "=w"(zero));
  return vdotq_s32(zero, a, x);
}

// Converts an integer of less than 23 bits that was added to the bits of kToInteger to a float by a subtraction, which
// takes a quarter of the time of the conversion instruction.
INLINE float32x4_t number(int32x4_t v) { return vsubq_f32(vreinterpretq_f32_s32(v), vdupq_n_f32(kToInteger)); }

// Converts four of sixteen bytes, from the byte `first` on, to floats.
INLINE float32x4_t numbers(uint8x16_t bytes, int first, float zero) {
  const uint32_t at = 0xffffff00;
  const uint32x4_t places = {at + first, at + first + 1, at + first + 2, at + first + 3};
  const uint8x16_t apart = vqtbl1q_u8(bytes, vreinterpretq_u8_u32(places));
  const uint32x4_t whole = vorrq_u32(vreinterpretq_u32_u8(apart), vdupq_n_u32(kToIntegerBits));
  return vsubq_f32(vreinterpretq_f32_u32(whole), vdupq_n_f32(kToInteger + zero));
}

INLINE int8x16_t low_nibbles(uint8x16_t v) { return vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))); }
INLINE int8x16_t high_nibbles(uint8x16_t v) { return vreinterpretq_s8_u8(vshrq_n_u8(v, 4)); }

// Types with 32 weights and one scale: the bytes of a block, the code of zero, and the codes in two vectors.

struct Q8_0 {
  static constexpr int kBytes = 34, kZero = 0;
  static INLINE void decode(const uint8_t* block, int8x16_t& first, int8x16_t& second) {
    first = vreinterpretq_s8_u8(vld1q_u8(block + 2));
    second = vreinterpretq_s8_u8(vld1q_u8(block + 18));
  }
};

struct Q4_0 {
  static constexpr int kBytes = 18, kZero = 8;
  static INLINE void decode(const uint8_t* block, int8x16_t& first, int8x16_t& second) {
    const uint8x16_t both = vld1q_u8(block + 2);
    first = low_nibbles(both);
    second = high_nibbles(both);
  }
};

struct IQ4_NL {
  static constexpr int kBytes = 18, kZero = 0;
  static INLINE void decode(const uint8_t* block, int8x16_t& first, int8x16_t& second) {
    alignas(16) static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                       1,    13,   25,  38,  53,  69,  89,  113};
    const int8x16_t values = vld1q_s8(kValues);
    const uint8x16_t both = vld1q_u8(block + 2);
    first = vqtbl1q_s8(values, vandq_u8(both, vdupq_n_u8(15)));
    second = vqtbl1q_s8(values, vshrq_n_u8(both, 4));
  }
};

// Multiplies four features by Rows, for a type with one scale per block.
template <class Type>
struct Plain {
  static constexpr int kBytes = Type::kBytes, kWeights = 32, kGroup = 32, kZero = Type::kZero, kFeatures = 4;

  template <int Rows>
  static NOINLINE void multiply(const uint8_t* weights, int64_t row_bytes, const Input x, int64_t row, float* out,
                                int64_t n) {
    float32x4_t sums[Rows][2] = {};
    int64_t b = 0;
    for (; b + 2 <= x.groups; b += 2) {
      const int64_t place = b * kBytes;
      // In memory order, not in order of use: this prefetches the next four features.
      const uint8_t* ahead = weights + 4 * row_bytes + 4 * place;
      if (row == 0)
        for (int line = 0; line < 4 * 2 * kBytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
      one<Rows, 0>(weights + place, row_bytes, x, row, b, sums);
      one<Rows, 1>(weights + place + kBytes, row_bytes, x, row, b + 1, sums);
    }
    if (b < x.groups) one<Rows, 0>(weights + b * kBytes, row_bytes, x, row, b, sums);
    for (int r = 0; r < Rows; ++r) vst1q_f32(out + (row + r) * n, vaddq_f32(sums[r][0], sums[r][1]));
  }

 private:
  template <int Rows, int Which>
  static INLINE void one(const uint8_t* at, int64_t row_bytes, const Input& x, int64_t row, int64_t b,
                         float32x4_t (&sums)[Rows][2]) {
    int32x4_t dots[Rows][4];
    int8x16_t given[Rows][2];
    for (int r = 0; r < Rows; ++r)
      for (int half = 0; half < 2; ++half)
        given[r][half] = vld1q_s8(x.codes + (row + r) * x.stride + b * 32 + half * 16);
    for (int f = 0; f < 4; ++f) {
      int8x16_t first, second;
      Type::decode(at + f * row_bytes, first, second);
      for (int r = 0; r < Rows; ++r) dots[r][f] = vdotq_s32(dot(first, given[r][0]), second, given[r][1]);
    }
    // Assembled by the integer unit, which is otherwise idle.
    const uint64_t bits = half_at(at) | half_at(at + row_bytes) << 16 | half_at(at + 2 * row_bytes) << 32 |
                          half_at(at + 3 * row_bytes) << 48;
    const float32x4_t scales = vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(bits)));
    for (int r = 0; r < Rows; ++r) {
      const int64_t g = (row + r) * x.groups + b;
      const int32x4_t bias = kZero == 0 ? vdupq_n_s32(kToIntegerBits) : vld1q_dup_s32(x.biases + g);
      const int32x4_t total = vaddq_s32(totals(dots[r][0], dots[r][1], dots[r][2], dots[r][3]), bias);
      sums[r][Which] = vfmaq_f32(sums[r][Which], number(total), vmulq_n_f32(scales, x.scales[g]));
    }
  }
};

// Multiplies one feature by Rows.
struct Q4_K {
  static constexpr int kBytes = 144, kWeights = 256, kGroup = 32, kZero = 0, kFeatures = 1;

  template <int Rows>
  static NOINLINE void multiply(const uint8_t* weights, int64_t row_bytes, const Input x, int64_t row, float* out,
                                int64_t n) {
    float32x4_t products[Rows] = {}, offsets[Rows] = {};
    const int8_t* codes = x.codes + row * x.stride;
    const float* x_scales = x.scales + row * x.groups;
    const float* counted = x.counted + row * x.groups;
    for (const uint8_t *at = weights, *end = weights + row_bytes; at < end; at += kBytes) {
      if (row == 0)
        for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(at + kAhead + line, 0, 2);
      uint32_t packed[3];
      std::memcpy(packed, at + 4, 12);
      const uint64_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, upper = 0x30303030;
      const uint64_t scale_bits = (packed[0] & six) | ((packed[2] & four) | (packed[0] >> 2 & upper)) << 32;
      const uint64_t offset_bits = (packed[1] & six) | ((packed[2] >> 4 & four) | (packed[1] >> 2 & upper)) << 32;
      const uint8x16_t bytes = vcombine_u8(vcreate_u8(scale_bits), vcreate_u8(offset_bits));
      const float32x4_t first = numbers(bytes, 0, 0), second = numbers(bytes, 4, 0);
      const float32x4_t first_low = numbers(bytes, 8, 0), second_low = numbers(bytes, 12, 0);
      const int32x4_t bias = vdupq_n_s32(kToIntegerBits);
      const float scale = number_at(at), offset = number_at(at + 2);
      int32x4_t pairs[Rows][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const uint8x16_t a = vld1q_u8(at + 16 + j * 32), b = vld1q_u8(at + 32 + j * 32);
        for (int r = 0; r < Rows; ++r) {
          const int8_t* given = codes + r * x.stride + j * 64;
          const int32x4_t low = vdotq_s32(dot(low_nibbles(a), vld1q_s8(given)), low_nibbles(b), vld1q_s8(given + 16));
          const int32x4_t high =
              vdotq_s32(dot(high_nibbles(a), vld1q_s8(given + 32)), high_nibbles(b), vld1q_s8(given + 48));
          pairs[r][j] = vpaddq_s32(low, high);
        }
      }
      for (int r = 0; r < Rows; ++r) {
        const float *by = x_scales + r * x.groups, *sum = counted + r * x.groups;
        const float32x4_t one = number(vaddq_s32(vpaddq_s32(pairs[r][0], pairs[r][1]), bias));
        const float32x4_t two = number(vaddq_s32(vpaddq_s32(pairs[r][2], pairs[r][3]), bias));
        const float32x4_t one_by = vmulq_f32(first, vld1q_f32(by)), two_by = vmulq_f32(second, vld1q_f32(by + 4));
        const float32x4_t both = vfmaq_f32(vmulq_f32(one, one_by), two, two_by);
        products[r] = vfmaq_n_f32(products[r], both, scale);
        const float32x4_t below = vfmaq_f32(vmulq_f32(first_low, vld1q_f32(sum)), second_low, vld1q_f32(sum + 4));
        offsets[r] = vfmaq_n_f32(offsets[r], below, offset);
      }
      codes += 256;
      x_scales += 8;
      counted += 8;
    }
    for (int r = 0; r < Rows; ++r) out[(row + r) * n] = vaddvq_f32(vsubq_f32(products[r], offsets[r]));
  }
};

// Multiplies one feature by Rows.
struct Q6_K {
  static constexpr int kBytes = 210, kWeights = 256, kGroup = 16, kZero = 32, kFeatures = 1;

  template <int Rows>
  static NOINLINE void multiply(const uint8_t* weights, int64_t row_bytes, const Input x, int64_t row, float* out,
                                int64_t n) {
    float32x4_t products[Rows] = {};
    const int8_t* codes = x.codes + row * x.stride;
    const float* x_scales = x.scales + row * x.groups;
    const int32_t* biases = x.biases + row * x.groups;
    for (const uint8_t *at = weights, *end = weights + row_bytes; at < end; at += kBytes) {
      if (row == 0)
        for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(at + kAhead + line, 0, 2);
      const float scale = number_at(at + 208);
      float32x4_t sums[Rows] = {};
      const uint8x16_t all_scales = veorq_u8(vld1q_u8(at + 192), vdupq_n_u8(128));  // signed scales, plus 128
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const uint8_t *low = at + half * 64, *high = at + 128 + half * 32;
        const float32x4_t first = numbers(all_scales, half * 8, 128), second = numbers(all_scales, half * 8 + 4, 128);
        int32x4_t pairs[Rows][4];
        const uint8x16_t upper[2] = {vld1q_u8(high), vld1q_u8(high + 16)};
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {  // 32 bytes: nibbles of the groups 2j, 2j + 1, and of 4 + 2j, 5 + 2j
          int8x16_t near[2], far[2];
          for (int c = 0; c < 2; ++c) {
            const uint8x16_t both = vld1q_u8(low + j * 32 + c * 16), mask = vdupq_n_u8(63);
            const uint8x16_t bits = j == 0 ? upper[c] : vshrq_n_u8(upper[c], 2);
            near[c] = vreinterpretq_s8_u8(vandq_u8(vsliq_n_u8(both, bits, 4), mask));
            far[c] = vreinterpretq_s8_u8(vandq_u8(vsriq_n_u8(bits, both, 4), mask));
          }
          for (int r = 0; r < Rows; ++r) {
            const int8_t* given = codes + r * x.stride + half * 128 + j * 32;
            pairs[r][j] = vpaddq_s32(dot(near[0], vld1q_s8(given)), dot(near[1], vld1q_s8(given + 16)));
            pairs[r][2 + j] = vpaddq_s32(dot(far[0], vld1q_s8(given + 64)), dot(far[1], vld1q_s8(given + 80)));
          }
        }
        for (int r = 0; r < Rows; ++r) {
          const int64_t g = r * x.groups + half * 8;
          const int32x4_t one = vaddq_s32(vpaddq_s32(pairs[r][0], pairs[r][1]), vld1q_s32(biases + g));
          const int32x4_t two = vaddq_s32(vpaddq_s32(pairs[r][2], pairs[r][3]), vld1q_s32(biases + g + 4));
          sums[r] = vfmaq_f32(sums[r], number(one), vmulq_f32(first, vld1q_f32(x_scales + g)));
          sums[r] = vfmaq_f32(sums[r], number(two), vmulq_f32(second, vld1q_f32(x_scales + g + 4)));
        }
      }
      for (int r = 0; r < Rows; ++r) products[r] = vfmaq_n_f32(products[r], sums[r], scale);
      codes += 256;
      x_scales += 16;
      biases += 16;
    }
    for (int r = 0; r < Rows; ++r) out[(row + r) * n] = vaddvq_f32(products[r]);
  }
};

// Multiplies the same rows by each of `copies` weights of n features, one after the other; the results overwrite each
// other.
template <class Type>
void multiply(const float* x, int64_t rows, const uint8_t* weights, int64_t copies, int64_t n, int64_t k, float* out) {
  const int64_t row_bytes = k / Type::kWeights * Type::kBytes;
  const int64_t groups = k / Type::kGroup, stride = k | 64;
  std::vector<int8_t> codes(rows * stride);
  std::vector<float> scales(rows * groups), counted(rows * groups);
  std::vector<int32_t> biases(rows * groups);
  const Input input{groups, stride, codes.data(), scales.data(), counted.data(), biases.data()};
  for (int64_t copy = 0; copy < copies; ++copy) {
    round_rows<Type::kGroup>(x, rows, k, Type::kZero, input);
    const uint8_t* weight = weights + copy * n * row_bytes;
    // A few features stay in the L1 cache for all rows.
    for (int64_t f = 0; f < n; f += Type::kFeatures) {
      const uint8_t* at = weight + f * row_bytes;
      int64_t row = 0;
      for (; row + 4 <= rows; row += 4) Type::template multiply<4>(at, row_bytes, input, row, out + f, n);
      for (; row < rows; ++row) Type::template multiply<1>(at, row_bytes, input, row, out + f, n);
    }
  }
}

}  // namespace

#define EXPORTED(name, type)                                                                                       \
  extern "C" void name(const float* x, int64_t rows, const uint8_t* weights, int64_t copies, int64_t n, int64_t k, \
                       float* out) {                                                                               \
    multiply<type>(x, rows, weights, copies, n, k, out);                                                           \
  }

EXPORTED(multiply_Q8_0, Plain<Q8_0>)
EXPORTED(multiply_Q6_K, Q6_K)
EXPORTED(multiply_Q4_K, Q4_K)
EXPORTED(multiply_IQ4_NL, Plain<IQ4_NL>)
EXPORTED(multiply_Q4_0, Plain<Q4_0>)
