// Measures the machine's limits for benchmarks: arithmetic without memory traffic, and memory reads without arithmetic.
//
// Each call does the work of one thread; the caller runs as many threads as it wants to measure. One more function
// measures a part of the quantized GEMM alone: the rounding of its input.

#include <ATen/Functions.h>

#include <cstdint>

#include "dot_kernels.h"
#include "isa.h"
#include "quantize_rows.h"
#include "unroll.h"

namespace backplane::cpu {
namespace {

struct ReadAll {
  template <int W>
  static BACKPLANE_INLINE uint32_t run(const uint8_t* from, int64_t bytes) {
    constexpr int64_t vector = W * 4, step = 4 * vector;
    Words<W> sums[4] = {};
    for (int64_t i = 0; i + step <= bytes; i += step) {
#if !defined(__aarch64__)  // Neoverse-N1 reads faster without software prefetch
      __builtin_prefetch(from + i + 4096);
#endif
      for (int v = 0; v < 4; ++v) {
        Words<W> words;
        std::memcpy(&words, from + i + v * vector, sizeof words);
        sums[v] ^= words;
      }
    }
    const Words<W> all = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
    return all[0];
  }
};

// Hides the value of a vector from the compiler, which would otherwise compute the loop at compile time or only once.
template <int W>
BACKPLANE_INLINE void forget(Floats<W>& vector) {
#if defined(__aarch64__)
  __asm__("" : "+w"(vector));
#elif defined(__x86_64__)
  __asm__("" : "+x"(vector));
#endif
}

// Multiply-adds in as many independent chains as keep the units busy and fit into 16 registers.
struct SpinFloats {
  static constexpr int kChains = 12, kLinks = 8;

  template <int W>
  static BACKPLANE_INLINE int64_t run(int64_t rounds) {
    Floats<W> sums[kChains], left = all<W>(0.5f), right = left;
    unroll<kChains>(BACKPLANE_UNROLL(c) { sums[c] = right; });
    unroll<kChains>(BACKPLANE_UNROLL(c) { forget<W>(sums[c]); });
    for (int64_t round = 0; round < rounds; ++round)
      unroll<kLinks * kChains>(BACKPLANE_UNROLL(i) {
        forget<W>(left);
        sums[i % kChains] += left * right;
      });
    unroll<kChains>(BACKPLANE_UNROLL(c) { left += sums[c]; });
    const volatile float used = left[0];
    static_cast<void>(used);
    return rounds * kLinks * kChains * W;
  }
};

}  // namespace
}  // namespace backplane::cpu

// Runs float32 multiply-adds; returns the number of multiplications.
extern "C" __attribute__((visibility("default"))) int64_t backplane_cpu_spin_float_products(int64_t rounds) {
  return backplane::cpu::pick<backplane::cpu::SpinFloats>()(rounds);
}

// Runs 8-bit dot-product instructions; returns the number of multiplications.
extern "C" __attribute__((visibility("default"))) int64_t backplane_cpu_spin_dot_products(int64_t rounds) {
  return backplane::cpu::dot_kernels().spin(rounds);
}

// Reads `bytes` bytes. The result depends on all of them, so the compiler cannot omit the reads.
extern "C" __attribute__((visibility("default"))) uint32_t backplane_cpu_read_memory(const uint8_t* from,
                                                                                   int64_t bytes) {
  return backplane::cpu::pick<backplane::cpu::ReadAll>()(from, bytes);
}

// Rounds x, [rows][k], `times` times with PyTorch's threads, as the quantized GEMM does for weights with `groups`
// groups.
extern "C" __attribute__((visibility("default"))) void backplane_cpu_round_input(float* x, int64_t rows, int64_t k,
                                                                               int64_t groups, int64_t times) {
  const at::Tensor input = at::from_blob(x, {rows, k}, at::kFloat);
  const int64_t padded = (k + groups - 1) / groups * groups;
  for (int64_t i = 0; i < times; ++i) backplane::cpu::quantize_rows(input, padded, groups, 1);
}
