// Implements the dot kernels with the dot-product instructions of ARMv8.2 (SDOT), which most ARM servers have.
//
// This file has its own kernel instead of the shared one of dot_products.h. The end of a group (convert the sums to
// float, multiply by two scales, accumulate) takes a third as many instructions as the group itself, and 32 registers
// have room for it only with a tile of six rows by two vectors, or two by four. Many rows with half-precision scales go
// through dot_ordered.h, four at a time.

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
#include "dot_ordered.h"

namespace backplane::cpu {
namespace {

constexpr int kBlock = 16, kVectors = 4;  // features of a block, and vectors that hold them
constexpr int kMostRows = 6;

struct Dots : Neon {
  using Eight = int8x8_t;

  // Eight positions of x are one register, and the instruction selects four of them: no broadcast is needed.
  static BACKPLANE_DOT Eight eight(const int8_t* x) { return vld1_s8(x); }
  static BACKPLANE_DOT Int dot_first(Int sum, int8x16_t code, Eight x) { return vdotq_lane_s32(sum, code, x, 0); }
  static BACKPLANE_DOT Int dot_second(Int sum, int8x16_t code, Eight x) { return vdotq_lane_s32(sum, code, x, 1); }
};

// Reads scales and offsets in their memory type, and multiplies by them.
template <class Number>
struct Factored;
template <>
struct Factored<float> {
  static BACKPLANE_DOT const float* scales(const Product& p) { return p.scales; }
  static BACKPLANE_DOT const float* offsets(const Product& p) { return p.offsets; }
  static BACKPLANE_DOT float32x4_t load(const float* from) { return Neon::load(from); }
};
template <>
struct Factored<uint16_t> {
  static BACKPLANE_DOT const uint16_t* scales(const Product& p) { return p.half_scales; }
  static BACKPLANE_DOT const uint16_t* offsets(const Product& p) { return p.half_offsets; }
  static BACKPLANE_DOT float32x4_t load(const uint16_t* from) { return Neon::load_halves(from); }
};

// Computes Rows by Vectors of a block, from the vector `first` on.
template <Codes C, int Rows, int Vectors, class Number>
class Tile {
  using F = Factored<Number>;

 public:
  BACKPLANE_DOT explicit Tile(const Product& p, int first) : p_(p), first_(first) {
    each(BACKPLANE_DO(i) {
      constexpr int r = i / Vectors, v = i % Vectors;
      sums_[i] = p.more ? vld1q_f32(tile(r, v)) : vdupq_n_f32(0.0f);
    });
  }

  BACKPLANE_DOT void run() {
    if (F::offsets(p_) != nullptr) add_offsets();
    add_products();
    store();
  }

  BACKPLANE_DOT void run_offsets() {
    add_offsets();
    store();
  }

 private:
  static constexpr int kVectorBytes = 16;
  static constexpr int64_t kStep = (C == Codes::nibbles ? 4 : 8) * kBlock;  // bytes of eight positions

  BACKPLANE_DOT void add_products() {
    const uint8_t* codes = p_.codes + first_ * kVectorBytes;
    const int8_t* x = p_.x;
    const uint8_t* ahead = first_ == 0 ? p_.ahead : nullptr;
    for (int64_t g = 0; g < p_.groups; ++g) {
      if constexpr (C == Codes::wide)
        if (ahead != nullptr)
          for (const uint8_t* end = ahead + p_.ahead_bytes; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
      begin(g);
      int64_t i = 0;
      for (; i + 16 <= p_.group; i += 16) {
        int8x16_t rows[Rows];
        repeat<Rows>(BACKPLANE_DO(r) { rows[r] = vld1q_s8(x + r * p_.x_stride); });
        eight<0>(codes, rows);
        eight<2>(codes + kStep, rows);
        codes += 2 * kStep;
        x += 16;
      }
      if (i < p_.group) {
        int8x16_t rows[Rows];
        repeat<Rows>(BACKPLANE_DO(r) {
          const int8x8_t half = vld1_s8(x + r * p_.x_stride);
          rows[r] = vcombine_s8(half, half);
        });
        eight<0>(codes, rows);
        codes += kStep;
        x += 8;
      }
      scale(g);
    }
  }

  BACKPLANE_DOT void store() const {
    each(BACKPLANE_DO(i) {
      constexpr int r = i / Vectors, v = i % Vectors;
      vst1q_f32(tile(r, v), sums_[i]);
    });
  }

  template <class F>
  static BACKPLANE_DOT void each(const F& f) {
    repeat<Rows * Vectors>(f);
  }

  BACKPLANE_DOT float* tile(int r, int v) const { return p_.tile + r * kBlock + (first_ + v) * 4; }

  BACKPLANE_DOT float32x4_t numbers(const Number* from, int64_t g, int v) const {
    return F::load(from + g * kBlock + (first_ + v) * 4);
  }

  BACKPLANE_DOT void begin(int64_t g) {
    const int32x4_t counter = vreinterpretq_s32_f32(vdupq_n_f32(kCounter));
    if (p_.correction == 0) {
      each(BACKPLANE_DO(i) { dots_[i] = counter; });
      return;
    }
    repeat<Rows>(BACKPLANE_DO(r) {
      const int32x4_t start = vaddq_s32(counter, vdupq_n_s32(p_.correction * p_.x_sums[r * p_.x_groups + g]));
      repeat<Vectors>(BACKPLANE_DO(v) { dots_[r * Vectors + v] = start; });
    });
  }

  // Accumulates eight positions, which are two elements of four in the registers of x, from element Q on.
  template <int Q>
  BACKPLANE_DOT void eight(const uint8_t* codes, const int8x16_t (&rows)[Rows]) {
    // The hardware prefetcher follows one stream well with one row and less well with more; prefetching every line
    // works for all.
    if constexpr (C != Codes::wide)
      repeat<kStep / 64>(BACKPLANE_DO(line) { __builtin_prefetch(codes + Neon::ahead + line * 64); });
    int8x16_t first[Vectors], second[Vectors];
    repeat<Vectors>(BACKPLANE_DO(v) {
      const uint8_t* at = codes + v * kVectorBytes;
      if constexpr (C == Codes::nibbles) {
        const uint8x16_t both = vld1q_u8(at);
        first[v] = Neon::low(both);
        second[v] = Neon::high(both);
      } else {
        first[v] = Neon::code<C>(vld1q_u8(at));
        second[v] = Neon::code<C>(vld1q_u8(at + kVectors * kVectorBytes));
      }
    });
    each(BACKPLANE_DO(i) { dots_[i] = vdotq_laneq_s32(dots_[i], first[i % Vectors], rows[i / Vectors], Q); });
    each(BACKPLANE_DO(i) { dots_[i] = vdotq_laneq_s32(dots_[i], second[i % Vectors], rows[i / Vectors], Q + 1); });
  }

  BACKPLANE_DOT void scale(int64_t g) {
    float32x4_t scales[Vectors];
    repeat<Vectors>(BACKPLANE_DO(v) { scales[v] = numbers(F::scales(p_), g, v); });
    repeat<Rows>(BACKPLANE_DO(r) {
      const float x_scale = p_.x_scales[r * p_.x_groups + g];
      repeat<Vectors>(BACKPLANE_DO(v) {
        constexpr int i = r * Vectors + v;
        const float32x4_t dot = vsubq_f32(vreinterpretq_f32_s32(dots_[i]), vdupq_n_f32(kCounter));
        // The order of operations is that of dot_ordered.h, so that a row's result does not depend on the number of
        // rows.
        sums_[i] = vfmaq_n_f32(sums_[i], vmulq_f32(dot, scales[v]), x_scale);
      });
    });
  }

  // Adds the sum of x over each group, times the offset of the group and feature.
  BACKPLANE_DOT void add_offsets() {
    int64_t g = 0;
    for (; g + 4 <= p_.groups; g += 4) {
      float32x4_t totals[Rows];
      repeat<Rows>(BACKPLANE_DO(r) {
        const float32x4_t sums = vcvtq_f32_s32(vld1q_s32(p_.x_sums + r * p_.x_groups + g));
        totals[r] = vmulq_f32(sums, vld1q_f32(p_.x_scales + r * p_.x_groups + g));
      });
      repeat<4>(BACKPLANE_DO(q) {
        each(BACKPLANE_DO(i) {
          const float32x4_t number = numbers(F::offsets(p_), g + q, i % Vectors);
          sums_[i] = vfmaq_laneq_f32(sums_[i], number, totals[i / Vectors], q);
        });
      });
    }
    for (; g < p_.groups; ++g)
      repeat<Rows>(BACKPLANE_DO(r) {
        const int64_t at = r * p_.x_groups + g;
        const float total = static_cast<float>(p_.x_sums[at]) * p_.x_scales[at];
        repeat<Vectors>(BACKPLANE_DO(v) {
          const float32x4_t number = numbers(F::offsets(p_), g, v);
          sums_[r * Vectors + v] = vfmaq_n_f32(sums_[r * Vectors + v], number, total);
        });
      });
  }

  const Product& p_;
  const int first_;
  float32x4_t sums_[Rows * Vectors];
  int32x4_t dots_[Rows * Vectors];
};

// One function per number of rows: with all of them in one, the compiler takes minutes.
template <Codes C, class Number, int Rows>
__attribute__((noinline)) BACKPLANE_TARGET void multiply_block(const Product& p) {
  constexpr int at_once = Rows <= 2 ? 4 : 2;
  for (int first = 0; first < kVectors; first += at_once) Tile<C, Rows, at_once, Number>(p, first).run();
}

__attribute__((noinline)) BACKPLANE_TARGET void add_offsets(const Product& p) {
  for (int first = 0; first < kVectors; first += 2) Tile<Codes::wide, ordered::kRows, 2, float>(p, first).run_offsets();
}

// Groups too long for the magic-number conversion, as with one scale per row, use the shared kernel, with at most four
// rows.
template <Codes C>
void multiply_tiles(const Product& whole) {
  const bool counted = whole.group <= kCounted;
  const Multiply four = C == Codes::nibbles ? nullptr : ordered::product(whole);
  Product p = whole;
  for (int64_t left = whole.rows; left > 0; left -= p.rows) {
    if (four != nullptr && left >= ordered::kRows) {
      p.rows = ordered::kRows;
      p.more = whole.more;
      if (p.offsets != nullptr) {
        add_offsets(p);
        p.more = true;
      }
      four(p);
    } else {
      p.more = whole.more;
      // Parts have eight rows; six and two would take longer than four and four.
      p.rows = counted ? (left >= 6 && left != 8 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1) : left > 4 ? (left + 1) / 2 : left;
      (!counted      ? multiply<Dots, C>
       : p.rows == 6 ? multiply_block<C, float, 6>
       : p.rows == 4 ? multiply_block<C, float, 4>
       : p.rows == 2 ? multiply_block<C, float, 2>
                     : multiply_block<C, float, 1>)(p);
    }
    p.ahead = nullptr;
    p.x += p.rows * p.x_stride;
    p.x_scales += p.rows * p.x_groups;
    p.x_sums += p.rows * p.x_groups;
    p.tile += p.rows * kBlock;
  }
}

// One or two rows with half-precision numbers: converting in the kernel costs less than a separate pass over them.
constexpr int kHalvesRows = 2;
template <Codes C>
void multiply_halves(const Product& p) {
  (p.rows == 2 ? multiply_block<C, uint16_t, 2> : multiply_block<C, uint16_t, 1>)(p);
}

// Widens nibbles to bytes, minus 8.
BACKPLANE_TARGET void widen_centred(const uint8_t* codes, int64_t groups, int64_t group, uint8_t* to) {
  for (int64_t i = 0; i < groups * group; i += 8) {
    repeat<kVectors>(BACKPLANE_DO(v) {
      const int8x16_t both = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(codes + v * 16), vdupq_n_u8(0x88)));
      Neon::write(to + v * 16, vshrq_n_s8(vshlq_n_s8(both, 4), 4));
      Neon::write(to + (kVectors + v) * 16, vshrq_n_s8(both, 4));
    });
    codes += kVectors * 16;
    to += 2 * kVectors * 16;
  }
}

bool available() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & (1UL << 20)) != 0;  // HWCAP_ASIMDDP
#else
  return true;  // every other system on these processors supports them
#endif
}

constexpr DotKernels kernels() {
  DotKernels result = kernels_of<Dots>("dotprod", &available);
  result.multiply8 = &multiply_tiles<Codes::bytes>;
  result.multiply4 = &multiply_tiles<Codes::nibbles>;
  result.multiply8_halves = &multiply_halves<Codes::bytes>;
  result.multiply4_halves = &multiply_halves<Codes::nibbles>;
  result.halves_rows = kHalvesRows;
  result.halves_group = kCounted;
  result.multiply_wide = &multiply_tiles<Codes::wide>;
  result.widen4_centred = &widen_centred;
  result.counter = kCounter;
  result.most_rows = kMostRows;
  result.many_rows = 2 * ordered::kRows;
  result.row_multiple = ordered::kRows;
  result.many_from = 2 * ordered::kRows;
  return result;
}

}  // namespace

const DotKernels kDotprodDots = kernels();

}  // namespace backplane::cpu
#endif
