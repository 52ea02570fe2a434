// Multiplies four rows by a block of sixteen features with a fixed instruction order (software pipelining).
//
// A compiler places the end of a group (convert the sums to float, multiply by two scales, accumulate) right behind the
// dot products that it depends on, and both vector units of the processor stall. Here two rows are multiplied while the
// sums of the previous two are scaled. Each instruction is a volatile asm statement, which compilers keep in order;
// they still allocate registers and addresses. Define BACKPLANE_TARGET before including this file.
#pragma once

#include "dot_neon.h"

namespace backplane::cpu {
namespace {

// Magic number for integer-to-float conversion: its lowest mantissa bits count integers, so a sum that starts with its
// bits is a float after a subtraction, which is faster than a conversion. The sum must stay within 2^22.
constexpr float kCounter = 0x1.8p23f;
constexpr int64_t kCounted = 128;  // positions
static_assert(kCounted * 127 * 255 < 1 << 22);

namespace ordered {

constexpr int kRows = 4;

// Sanitizers do not see the reads of asm statements.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BACKPLANE_SEEN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define BACKPLANE_SEEN 1
#endif

// Loaded from memory, because a load does not occupy the units that multiply.
alignas(16) constexpr float kCounters[4] = {kCounter, kCounter, kCounter, kCounter};
alignas(16) constexpr float kNothing[8] = {};

using Dots = int32x4_t[4];  // of two rows by two vectors

template <class Vector, class T>
BACKPLANE_DOT void load(Vector& to, const T* from) {
#if defined(BACKPLANE_SEEN)
  std::memcpy(&to, from, sizeof(to));
#else
  __asm__ volatile("ldr %q0, %1" : "=w"(to) : "m"(*reinterpret_cast<const Vector*>(from)));
#endif
}

BACKPLANE_DOT void load_one(float32x4_t& to, const float* from) {
#if defined(BACKPLANE_SEEN)
  to = vdupq_n_f32(*from);
#else
  __asm__ volatile("ldr %s0, %1" : "=w"(to) : "m"(*from));
#endif
}

BACKPLANE_DOT void begin(Dots& dots) {
  repeat<4>(BACKPLANE_DO(i) { __asm__ volatile("ldr %q0, %1" : "=w"(dots[i]) : "m"(kCounters)); });
}

// Multiplies four positions of two rows: element K of the four elements of four positions in a register of x.
template <int K>
BACKPLANE_DOT void multiply(Dots& dots, const int8x16_t (&weight)[8], const int8x16_t (&rows)[2]) {
  repeat<4>(BACKPLANE_DO(i) {
    __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[%3]"
                     : "+w"(dots[i])
                     : "w"(weight[2 * K + i % 2]), "w"(rows[i / 2]), "i"(K));
  });
}
template <int K>
BACKPLANE_DOT void read_and_multiply(Dots& dots, const uint8_t* codes, int8x16_t (&weight)[8],
                                     const int8x16_t (&rows)[2]) {
  load(weight[2 * K], codes + K * 64);
  load(weight[2 * K + 1], codes + K * 64 + 16);
  multiply<K>(dots, weight, rows);
}

// The end of a group for one row, in two steps: (dots - counter) * scale, then times the row's scale, accumulated.
struct Scaling {
  float32x4_t left, right;  // scales of the group
  float32x4_t a, b, row;

  BACKPLANE_DOT void scale(int32x4_t l, int32x4_t r, const float* counted, const float* x_scale) {
    load(a, counted);
    load(b, counted + 4);
    __asm__ volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(a) : "w"(l), "w"(left));
    __asm__ volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(b) : "w"(r), "w"(right));
    load_one(row, x_scale);
  }
  BACKPLANE_DOT void add(float32x4_t& l, float32x4_t& r) const {
    __asm__ volatile("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(l) : "w"(a), "w"(row));
    __asm__ volatile("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(r) : "w"(b), "w"(row));
  }
};

// Computes the vectors `first` and `first + 1` of the block.
template <int Group>
BACKPLANE_DOT void multiply_half(const Product& p, int first) {
  const uint8_t* codes = p.codes + first * 16;
  const int8_t *x0 = p.x, *x1 = x0 + p.x_stride, *x2 = x1 + p.x_stride, *x3 = x2 + p.x_stride;
  const int64_t x_groups = p.x_groups;
  const float *scales = p.scales + first * 4, *counted = p.counted + first * 4, *x_scales = p.x_scales;
  // Before the first group, the lower rows have no sums to scale.
  const float *counted_before = kNothing, *x_scales_before = x_scales;
  const uint8_t* ahead = first == 0 ? p.ahead : nullptr;
  float* tile = p.tile + first * 4;
  float32x4_t sums[2 * kRows];
  repeat<2 * kRows>(BACKPLANE_DO(i) {
    sums[i] = p.more ? vld1q_f32(tile + i / 2 * 16 + i % 2 * 4) : vdupq_n_f32(0.0f);
  });
  Dots upper, lower;
  begin(lower);
  Scaling s{vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), {}, {}, {}};
  for (int64_t g = p.groups; g > 0; --g) {
    if (ahead != nullptr)
      for (const uint8_t* end = ahead + p.ahead_bytes; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
    repeat<Group / 16>(BACKPLANE_DO(i) {
      constexpr bool begins = i == 0, ends = i == Group / 16 - 1;
      const uint8_t* at = codes + i * 256;
      int8x16_t weight[8], rows[2];
      if constexpr (begins) begin(upper);
      load(rows[0], x0 + i * 16);
      load(rows[1], x1 + i * 16);
      read_and_multiply<0>(upper, at, weight, rows);
      if constexpr (begins) s.scale(lower[0], lower[1], counted_before, x_scales_before + 2 * x_groups);
      read_and_multiply<1>(upper, at, weight, rows);
      if constexpr (begins) {
        s.add(sums[4], sums[5]);
        s.scale(lower[2], lower[3], counted_before, x_scales_before + 3 * x_groups);
      }
      read_and_multiply<2>(upper, at, weight, rows);
      if constexpr (begins) {
        s.add(sums[6], sums[7]);
        load(s.left, scales);
        load(s.right, scales + 4);
      }
      read_and_multiply<3>(upper, at, weight, rows);
      if constexpr (begins) begin(lower);
      load(rows[0], x2 + i * 16);
      load(rows[1], x3 + i * 16);
      multiply<0>(lower, weight, rows);
      if constexpr (ends) s.scale(upper[0], upper[1], counted, x_scales);
      multiply<1>(lower, weight, rows);
      if constexpr (ends) {
        s.add(sums[0], sums[1]);
        s.scale(upper[2], upper[3], counted, x_scales + x_groups);
      }
      multiply<2>(lower, weight, rows);
      if constexpr (ends) s.add(sums[2], sums[3]);
      multiply<3>(lower, weight, rows);
    });
    counted_before = counted;
    x_scales_before = x_scales;
    codes += Group * 16;
    x0 += Group;
    x1 += Group;
    x2 += Group;
    x3 += Group;
    scales += 16;
    counted += 16;
    x_scales += 1;
  }
  s.scale(lower[0], lower[1], counted_before, x_scales_before + 2 * x_groups);
  s.add(sums[4], sums[5]);
  s.scale(lower[2], lower[3], counted_before, x_scales_before + 3 * x_groups);
  s.add(sums[6], sums[7]);
  repeat<2 * kRows>(BACKPLANE_DO(i) { vst1q_f32(tile + i / 2 * 16 + i % 2 * 4, sums[i]); });
}

template <int Group>
__attribute__((noinline)) BACKPLANE_TARGET void multiply_block(const Product& p) {
  for (int first = 0; first < 4; first += 2) multiply_half<Group>(p, first);
}

// Returns the kernel for four rows by 8-bit codes, without offsets; or null if the arguments do not allow it. The
// counter is subtracted by one multiply-add, which is exact if the scale times the counter is.
inline Multiply product(const Product& p) {
  if (p.counted == nullptr || p.correction != 0) return nullptr;
  return p.group == 32    ? multiply_block<32>
         : p.group == 64  ? multiply_block<64>
         : p.group == 128 ? multiply_block<128>
                          : nullptr;
}

}  // namespace ordered
}  // namespace
}  // namespace backplane::cpu
