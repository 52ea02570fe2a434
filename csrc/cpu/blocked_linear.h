// The inner product of the blocked linear layer: a few rows of the input times one block of the weight.
//
// A block is some rows of the weight, transposed in memory: [k][rows]. A step along k then reads adjacent weights, multiplies them by one broadcast number per row, and needs no sum across a vector at the end. 16-bit weights
// are widened on their way into the registers: half the bytes of float32 are read, and the arithmetic is float32 on
// processors that have no other.
#pragma once

#include "isa.h"

#if defined(__clang__)
#define BACKPLANE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define BACKPLANE_UNROLL _Pragma("GCC unroll 32")
#endif

namespace backplane::cpu {

// Vectors side by side in a block, and rows at once: as many sums as the registers hold beside what is being read.
template <int W>
constexpr int block_vectors() {
#if defined(__aarch64__)
  return 4;
#else
  return 2;
#endif
}
template <int W>
constexpr int most_rows() {
  return W == 16 ? 14 : 6;
}
constexpr int kMostRows = 14;

// tile[row][column] = sum over k of x[row][k] * block[k][column]; tile's rows are adjacent.
template <int Rows, class T>
struct BlockProduct {
  template <int W>
  static BACKPLANE_INLINE void run(const float* x, int64_t x_stride, const T* block, int64_t k, float* tile) {
    if constexpr (Rows <= most_rows<W>()) {
      constexpr int V = block_vectors<W>();
      // A multiplication waits for the one before it on the same sum; with few sums, consecutive steps get their own.
      constexpr int Steps = Rows * V >= 8 ? 1 : Rows * V >= 4 ? 2 : 4;
      Floats<W> sums[Steps][Rows][V];
      BACKPLANE_UNROLL
      for (int s = 0; s < Steps; ++s)
        BACKPLANE_UNROLL
        for (int r = 0; r < Rows; ++r)
          BACKPLANE_UNROLL
          for (int v = 0; v < V; ++v) sums[s][r][v] = Floats<W>{};
      int64_t i = 0;
      for (; i + Steps <= k; i += Steps) {
        BACKPLANE_UNROLL
        for (int s = 0; s < Steps; ++s) step<W, V>(x + i + s, x_stride, block + (i + s) * (V * W), sums[s]);
      }
      for (; i < k; ++i) step<W, V>(x + i, x_stride, block + i * (V * W), sums[0]);
      BACKPLANE_UNROLL
      for (int r = 0; r < Rows; ++r)
        BACKPLANE_UNROLL
        for (int v = 0; v < V; ++v) {
          Floats<W> total = sums[0][r][v];
          BACKPLANE_UNROLL
          for (int s = 1; s < Steps; ++s) total += sums[s][r][v];
          store<W>(tile + (r * V + v) * W, total);
        }
    } else {
      __builtin_unreachable();
    }
  }

 private:
  template <int W, int V>
  static BACKPLANE_INLINE void step(const float* x, int64_t x_stride, const T* block, Floats<W> (&sums)[Rows][V]) {
    Floats<W> weights[V];
    BACKPLANE_UNROLL
    for (int v = 0; v < V; ++v) weights[v] = read<W>(block + v * W);
    BACKPLANE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Floats<W> value = all<W>(x[r * x_stride]);
      BACKPLANE_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] += value * weights[v];
    }
  }
};

}  // namespace backplane::cpu
