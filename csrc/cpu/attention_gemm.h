// Multiplies small float32 matrices that stay in the L1 cache: the GEMM of attention with many queries.
//
//   c[i][j] (+)= sum over t of a(i, t) * b[t][j]
#pragma once

#include "simd.h"
#include "unroll.h"

namespace backplane::cpu::attention {

// The direction in which elements of a are adjacent: along t, a(i, t) = a[i * stride + t]; or along i, a[t * stride +
// i].
enum class Along { steps, rows };

// Accumulates M rows by N vectors of columns, one element of a per row and step.
template <int W, int M, int N, Along A>
BACKPLANE_INLINE void add_steps(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t steps,
                                Floats<W> (&sums)[M][N]) {
  for (int64_t t = 0; t < steps; ++t) {
    Floats<W> row[N];
    for (int j = 0; j < N; ++j) row[j] = load<W>(b + t * b_stride + j * W);
    for (int i = 0; i < M; ++i) {
      const float factor = A == Along::steps ? a[i * a_stride + t] : a[t * a_stride + i];
      for (int j = 0; j < N; ++j) sums[i][j] += factor * row[j];
    }
  }
}

// The same for ARM, which multiplies by one lane of a register: reads four elements of a at a time.
template <int M, int N, Along A>
BACKPLANE_INLINE void add_steps_by_lanes(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                                         int64_t steps, Floats<4> (&sums)[M][N]) {
  int64_t t = 0;
  if constexpr (A == Along::steps) {
    for (; t + 4 <= steps; t += 4) {
      Factors factors[M];
      unroll<M>(BACKPLANE_UNROLL(i) { factors[i] = load_factors(a + i * a_stride + t); });
      unroll<4>(BACKPLANE_UNROLL(q) {
        Floats<4> row[N];
        unroll<N>(BACKPLANE_UNROLL(j) { row[j] = load<4>(b + (t + q) * b_stride + j * 4); });
        unroll<M * N>(BACKPLANE_UNROLL(e) {
          sums[e / N][e % N] = add_product<q>(sums[e / N][e % N], row[e % N], factors[e / N]);
        });
      });
    }
    add_steps<4, M, N, A>(a + t, a_stride, b + t * b_stride, b_stride, steps - t, sums);
  } else {
    static_assert(M % 4 == 0);
    for (; t < steps; ++t) {
      Factors factors[M / 4];
      unroll<M / 4>(BACKPLANE_UNROLL(i) { factors[i] = load_factors(a + t * a_stride + 4 * i); });
      Floats<4> row[N];
      unroll<N>(BACKPLANE_UNROLL(j) { row[j] = load<4>(b + t * b_stride + j * 4); });
      unroll<M * N>(BACKPLANE_UNROLL(e) {
        constexpr int i = e / N;
        sums[i][e % N] = add_product<i % 4>(sums[i][e % N], row[e % N], factors[i / 4]);
      });
    }
  }
}

template <int W, int M, int N, bool kAdd, Along A>
BACKPLANE_INLINE void gemm_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                                 int64_t c_stride, int64_t steps) {
  Floats<W> sums[M][N];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) sums[i][j] = kAdd ? load<W>(c + i * c_stride + j * W) : Floats<W>{};
  if constexpr (kHasFactors && W == 4)
    add_steps_by_lanes<M, N, A>(a, a_stride, b, b_stride, steps, sums);
  else
    add_steps<W, M, N, A>(a, a_stride, b, b_stride, steps, sums);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store<W>(c + i * c_stride + j * W, sums[i][j]);
}

// Accepts any number of columns that is a multiple of W. Rows are rounded up to a multiple of 8, and c must have them.
template <int W, bool kAdd, Along A>
BACKPLANE_INLINE void gemm(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t b_stride,
                           int64_t columns, float* c, int64_t c_stride, int64_t steps) {
  constexpr int kVectors = W == 16 || kHasFactors ? 4 : 2;  // x86 has 16 registers below AVX-512
  const auto from = [&](int64_t i) __attribute__((always_inline)) { return a + (A == Along::steps ? i * a_stride : i); };
  int64_t j = 0;
  for (; j + kVectors * W <= columns; j += kVectors * W)
    for (int64_t i = 0; i < rows; i += 4)
      gemm_block<W, 4, kVectors, kAdd, A>(from(i), a_stride, b + j, b_stride, c + i * c_stride + j, c_stride, steps);
  for (; j < columns; j += W)
    for (int64_t i = 0; i < rows; i += 8)
      gemm_block<W, 8, 1, kAdd, A>(from(i), a_stride, b + j, b_stride, c + i * c_stride + j, c_stride, steps);
}

}  // namespace backplane::cpu::attention
