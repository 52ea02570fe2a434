// Linear layers with 16-bit weights on processors whose matrix units do not take them.
//
// PyTorch multiplies bfloat16 and float16 through oneDNN or its own loops, which without BF16 (FP16) instructions run
// at a small fraction of the memory bandwidth. Here a weight is widened to float32 in registers on its way from memory,
// so half the bytes of a float32 model are read and the arithmetic is float32. A few rows are multiplied directly; many
// rows widen one panel of the weight at a time and leave the product to the float32 library.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include "isa.h"

namespace backplane::cpu {
namespace {

constexpr int64_t kRowsAtOnce = 4;      // weight rows per register block
constexpr int64_t kFewRows = 16;        // up to here the product is bound by reading the weight
constexpr int64_t kPanelBytes = 8 << 20;  // large enough that the float32 product runs at its own speed

using DotBlock = void (*)(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, int64_t k, float* out,
                          int64_t out_stride);
using Widen = void (*)(const uint16_t* from, float* to, int64_t count);

// out[m][n] = dot(x[m], w[n]) for M x N rows, K a free length.
template <int W, Half16 F, int M, int N>
BACKPLANE_INLINE void dot_block(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, int64_t k,
                                float* out, int64_t out_stride) {
  Floats<W> sums[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sums[m][n] = Floats<W>{};
  int64_t i = 0;
  for (; i + W <= k; i += W) {
    Floats<W> weights[N];
    for (int n = 0; n < N; ++n) weights[n] = widen<W, F>(w + n * w_stride + i);
    for (int m = 0; m < M; ++m) {
      const Floats<W> values = load<W>(x + m * x_stride + i);
      for (int n = 0; n < N; ++n) sums[m][n] += values * weights[n];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      float total = sum<W>(sums[m][n]);
      for (int64_t rest = i; rest < k; ++rest) total += x[m * x_stride + rest] * widen_one<F>(w[n * w_stride + rest]);
      out[m * out_stride + n] = total;
    }
}

template <int W, Half16 F>
BACKPLANE_INLINE void widen_run(const uint16_t* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store<W>(to + i, widen<W, F>(from + i));
  for (; i < count; ++i) to[i] = widen_one<F>(from[i]);
}

struct Kernels {
  DotBlock one_by_four, four_by_four, one_by_one;
  Widen widen;
};

#define BACKPLANE_DEFINE(SUFFIX, TARGET, W)                                                                          \
  template <Half16 F, int M, int N>                                                                                  \
  TARGET void dot_##SUFFIX(const float* x, int64_t xs, const uint16_t* w, int64_t ws, int64_t k, float* o,           \
                           int64_t os) {                                                                             \
    dot_block<W, F, M, N>(x, xs, w, ws, k, o, os);                                                                   \
  }                                                                                                                  \
  template <Half16 F>                                                                                                \
  TARGET void widen_##SUFFIX(const uint16_t* from, float* to, int64_t count) {                                       \
    widen_run<W, F>(from, to, count);                                                                                \
  }                                                                                                                  \
  template <Half16 F>                                                                                                \
  Kernels kernels_##SUFFIX() {                                                                                       \
    return {dot_##SUFFIX<F, 1, 4>, dot_##SUFFIX<F, 4, 4>, dot_##SUFFIX<F, 1, 1>, widen_##SUFFIX<F>};                 \
  }

BACKPLANE_DEFINE(base, , 4)
#if defined(__x86_64__)
BACKPLANE_DEFINE(avx2, __attribute__((target("avx2,fma,f16c"))), 8)
BACKPLANE_DEFINE(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,fma,f16c"))), 16)
#endif

template <Half16 F>
Kernels choose() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return kernels_avx512<F>();
  if (isa() == Isa::avx2) return kernels_avx2<F>();
#endif
  return kernels_base<F>();
}

const Kernels& kernels(at::ScalarType type) {
  static const Kernels bfloat = choose<Half16::bfloat>();
  static const Kernels ieee = choose<Half16::ieee>();
  return type == at::kBFloat16 ? bfloat : ieee;
}

// x [m, k] float32, weight [n, k] 16-bit, out [m, n] float32; rows of x are few.
void few_rows(const at::Tensor& x, const at::Tensor& weight, at::Tensor& out) {
  const int64_t m = x.size(0), k = x.size(1), n = weight.size(0);
  const Kernels& run = kernels(weight.scalar_type());
  const float* xp = x.const_data_ptr<float>();
  const auto* wp = static_cast<const uint16_t*>(weight.const_data_ptr());
  float* op = out.mutable_data_ptr<float>();
  const int64_t ws = weight.stride(0);
  const int64_t blocks = (n + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, k * m));
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * kRowsAtOnce;
      const uint16_t* w = wp + row * ws;
      if (row + kRowsAtOnce <= n) {
        int64_t i = 0;
        for (; i + 4 <= m; i += 4) run.four_by_four(xp + i * k, k, w, ws, k, op + i * n + row, n);
        for (; i < m; ++i) run.one_by_four(xp + i * k, k, w, ws, k, op + i * n + row, n);
      } else {
        for (int64_t r = row; r < n; ++r)
          for (int64_t i = 0; i < m; ++i) run.one_by_one(xp + i * k, k, wp + r * ws, ws, k, op + i * n + r, n);
      }
    }
  });
}

void many_rows(const at::Tensor& x, const at::Tensor& weight, at::Tensor& out) {
  const int64_t k = x.size(1), n = weight.size(0);
  const int64_t panel = std::max<int64_t>(16, kPanelBytes / std::max<int64_t>(1, k * 4));
  const Kernels& run = kernels(weight.scalar_type());
  const auto* wp = static_cast<const uint16_t*>(weight.const_data_ptr());
  const int64_t ws = weight.stride(0);
  at::Tensor scratch = at::empty({std::min(panel, n), k}, x.options());
  float* sp = scratch.mutable_data_ptr<float>();
  for (int64_t start = 0; start < n; start += panel) {
    const int64_t rows = std::min(panel, n - start);
    at::parallel_for(0, rows, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, k)), [&](int64_t b, int64_t e) {
      for (int64_t r = b; r < e; ++r) run.widen(wp + (start + r) * ws, sp + r * k, k);
    });
    at::Tensor target = out.narrow(1, start, rows);
    at::mm_out(target, x, scratch.narrow(0, 0, rows).t());
  }
}

at::Tensor widening_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const int64_t k = weight.size(1), n = weight.size(0);
  at::Tensor rows = x.reshape({-1, k}).to(at::kFloat).contiguous();
  at::Tensor out = at::empty({rows.size(0), n}, rows.options());
  if (rows.size(0) > 0 && n > 0) {
    if (rows.size(0) <= kFewRows) few_rows(rows, weight, out);
    else many_rows(rows, weight, out);
  }
  if (bias.has_value() && bias->defined()) out.add_(bias->to(at::kFloat));
  auto shape = x.sizes().vec();
  shape.back() = n;
  return out.to(x.scalar_type()).reshape(shape);
}

}  // namespace

bool has_fast_matmul(at::ScalarType type);

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1),
              "linear: input of ", x.sizes(), " does not fit a weight of ", weight.sizes());
  const bool narrow = weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kHalf;
  if (narrow && x.scalar_type() == weight.scalar_type() && weight.stride(1) == 1 &&
      !has_fast_matmul(weight.scalar_type()))
    return widening_linear(x, weight, bias);
  return at::linear(x, weight, bias);
}

}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("linear", &backplane::cpu::linear);
  library.impl("logits", &backplane::cpu::linear);
}
