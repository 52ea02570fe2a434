// For benchmarks. What the machine can do at most: products without memory, and memory without products; each call is one
// thread's share, and the caller has as many threads as it wants to know about. And a part of a product by itself: the
// rounding of its input.

#include <ATen/Functions.h>

#include <cstdint>

#include "dot_kernels.h"
#include "isa.h"
#include "quantize_rows.h"

namespace backplane::cpu {
namespace {

struct ReadAll {
  template <int W>
  static BACKPLANE_INLINE uint32_t run(const uint8_t* from, int64_t bytes) {
    constexpr int64_t vector = W * 4, step = 4 * vector;
    Words<W> sums[4] = {};
    for (int64_t i = 0; i + step <= bytes; i += step) {
#if !defined(__aarch64__)  // Neoverse-N1 reads faster when it is not asked to read ahead
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

}  // namespace
}  // namespace backplane::cpu

// Multiplications of 8-bit numbers that were done.
extern "C" __attribute__((visibility("default"))) int64_t backplane_cpu_spin_dot_products(int64_t rounds) {
  return backplane::cpu::dot_kernels().spin(rounds);
}

// Reads so many bytes; the result depends on them.
extern "C" __attribute__((visibility("default"))) uint32_t backplane_cpu_read_memory(const uint8_t* from,
                                                                                   int64_t bytes) {
  return backplane::cpu::pick<backplane::cpu::ReadAll>()(from, bytes);
}

// Rounds x, [rows][k], as products with so many groups do, so many times, with PyTorch's threads.
extern "C" __attribute__((visibility("default"))) void backplane_cpu_round_input(float* x, int64_t rows, int64_t k,
                                                                               int64_t groups, int64_t times) {
  const at::Tensor input = at::from_blob(x, {rows, k}, at::kFloat);
  const int64_t padded = (k + groups - 1) / groups * groups;
  for (int64_t i = 0; i < times; ++i) backplane::cpu::quantize_rows(input, padded, groups, 1);
}
