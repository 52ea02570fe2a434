// Multiplies by 16-bit weights as the checkpoint stores them: all weights where PyTorch's own 16-bit GEMM is fast with
// many rows, and the embedding table of a model that also computes its logits with it.
//
// With few rows a matrix product is bound by reading the weight, and there PyTorch's libraries are far from the memory
// bandwidth (docs/internals/kernels.md). Here a weight is widened to float32 in registers, so half the bytes of a
// float32 model are read and the arithmetic is float32. With more rows PyTorch's library computes the product: in the
// 16-bit type itself if the processor has instructions for it, else in float32, one widened panel of the weight at a
// time.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <array>
#include <utility>

#include "isa.h"
#include "rows.h"
#include "tiling.h"

namespace backplane::cpu {
namespace {

// Rows up to which this kernel is used: on x86 while it is bound by reading the weight; on ARM while it is faster than
// widening a panel for the library, which takes ten times as long with 17 rows.
#if defined(__aarch64__)
constexpr int64_t kFewRows = 64;
#else
constexpr int64_t kFewRows = 16;
#endif
constexpr int64_t kFewBesideLibrary = 6;   // the same where the library has 16-bit instructions (measured)
constexpr int64_t kColumns = 32;           // results of a row that are rounded and stored together
constexpr int64_t kLine = 32;              // weights in a cache line
constexpr int64_t kPanelBytes = 8 << 20;   // large enough that the float32 GEMM reaches its full speed
constexpr int kMostAtOnce = 6;

// Rows of the weight, and at most of x, that are multiplied at once: as many accumulators as there are registers.
template <int W>
constexpr int weights_at_once() {
  return W == 8 ? 2 : 4;
}
template <int W>
constexpr int rows_at_once() {
  return W == 8 ? 4 : kMostAtOnce;
}

// Like widen, with the float16 conversion instruction of AVX2 and AVX-512; without it several instructions are needed.
template <int W, Half16 F>
BACKPLANE_INLINE Floats<W> widened(const uint16_t* from) {
#if defined(__x86_64__)
  if constexpr (F == Half16::ieee && W >= 8) {
    Shorts<W> narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    Floats<W> wide;
    __asm__("vcvtph2ps %1, %0" : "=v"(wide) : "v"(narrow));
    return wide;
  }
#endif
  return widen<W, F>(from);
}

template <Half16 F>
struct WidenRun {
  template <int W>
  static BACKPLANE_INLINE void run(const uint16_t* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store<W>(to + i, widened<W, F>(from + i));
    for (; i < count; ++i) to[i] = widen_one<F>(from[i]);
  }
};

// Computes out[m][n] = x[m] . w[n] for M rows of x and, with `Whole`, weights_at_once() rows of the weight, else one.
// Prefetches the memory `ahead` weights further: what the next call reads, too close for the hardware prefetcher to
// follow.
template <Half16 F, int M, bool Whole>
struct DotRows {
  template <int W>
  static BACKPLANE_INLINE void run(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride, int64_t ahead,
                                   int64_t k, float* out, int64_t out_stride) {
    if constexpr (M <= rows_at_once<W>()) {
      constexpr int N = Whole ? weights_at_once<W>() : 1;
      Floats<W> sums[M][N];
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) sums[m][n] = Floats<W>{};
      int64_t i = 0;
      for (; i + kLine <= k; i += kLine) {
        for (int n = 0; n < N; ++n) __builtin_prefetch(w + n * w_stride + i + ahead);
        for (int64_t j = i; j < i + kLine; j += W) add<W, N>(x + j, x_stride, w + j, w_stride, sums);
      }
      for (; i + W <= k; i += W) add<W, N>(x + i, x_stride, w + i, w_stride, sums);
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
          float total = sum<W>(sums[m][n]);
          for (int64_t rest = i; rest < k; ++rest)
            total += x[m * x_stride + rest] * widen_one<F>(w[n * w_stride + rest]);
          out[m * out_stride + n] = total;
        }
    } else {
      __builtin_unreachable();
    }
  }

 private:
  template <int W, int N>
  static BACKPLANE_INLINE void add(const float* x, int64_t x_stride, const uint16_t* w, int64_t w_stride,
                                   Floats<W> (&sums)[M][N]) {
    Floats<W> weights[N];
    for (int n = 0; n < N; ++n) weights[n] = widened<W, F>(w + n * w_stride);
    for (int m = 0; m < M; ++m) {
      const Floats<W> values = load<W>(x + m * x_stride);
      for (int n = 0; n < N; ++n) sums[m][n] += values * weights[n];
    }
  }
};

using Dot = void (*)(const float*, int64_t, const uint16_t*, int64_t, int64_t, int64_t, float*, int64_t);
using Dots = std::array<Dot, kMostAtOnce>;  // by number of rows, minus one

template <Half16 F, bool Whole, size_t... I>
Dots dots_for(std::index_sequence<I...>) {
  return {pick<DotRows<F, int(I) + 1, Whole>>()...};
}

template <Half16 F, bool Whole>
Dots dots() {
  return dots_for<F, Whole>(std::make_index_sequence<kMostAtOnce>{});
}

// x is [m, k] float32, weight [n, k], out [m, n] in the weight's type; m is at most kFewRows.
template <class T, Half16 F>
void few_rows(const at::Tensor& x, const at::Tensor& weight, const float* bias, at::Tensor& out) {
  const int64_t m = x.size(0), k = x.size(1), n = weight.size(0), stride = weight.stride(0);
  const bool narrow = isa() == Isa::avx2;
  const int64_t at_once = narrow ? weights_at_once<8>() : weights_at_once<16>();
  const Parts parts(m, narrow ? rows_at_once<8>() : rows_at_once<16>());
  const Dots whole = dots<F, true>(), single = dots<F, false>();
  const auto write_row = pick<Finish<T>>();
  const float* xp = x.const_data_ptr<float>();
  const auto* wp = static_cast<const uint16_t*>(weight.const_data_ptr());
  T* op = mutable_elements<T>(out);
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, k * m * kColumns));
  at::parallel_for(0, (n + kColumns - 1) / kColumns, grain, [&](int64_t first, int64_t last) {
    alignas(64) float tile[kFewRows * kColumns];
    for (int64_t group = first; group < last; ++group) {
      const int64_t begin = group * kColumns, columns = std::min(kColumns, n - begin);
      for (int64_t column = 0; column < columns;) {
        const bool fits = column + at_once <= columns;
        const Dots& dot = fits ? whole : single;
        const int64_t step = fits ? at_once : 1;
        for (int64_t part = 0; part < parts.count; ++part) {
          const int64_t row = parts.begin(part), rows = parts.size(part);
          dot[rows - 1](xp + row * k, k, wp + (begin + column) * stride, stride, step * stride, k,
                        tile + row * kColumns + column, kColumns);
        }
        column += step;
      }
      for (int64_t row = 0; row < m; ++row)
        write_row(tile + row * kColumns, bias ? bias + begin : nullptr, op + row * n + begin, columns);
    }
  });
}

template <Half16 F>
void many_rows(const at::Tensor& x, const at::Tensor& weight, at::Tensor& out) {
  const int64_t k = x.size(1), n = weight.size(0);
  const int64_t panel = std::max<int64_t>(16, kPanelBytes / std::max<int64_t>(1, k * 4));
  const auto widen_row = pick<WidenRun<F>>();
  const auto* wp = static_cast<const uint16_t*>(weight.const_data_ptr());
  const int64_t stride = weight.stride(0);
  at::Tensor scratch = at::empty({std::min(panel, n), k}, x.options());
  float* sp = scratch.mutable_data_ptr<float>();
  for (int64_t start = 0; start < n; start += panel) {
    const int64_t rows = std::min(panel, n - start);
    at::parallel_for(0, rows, rows_per_thread(k), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) widen_row(wp + (start + r) * stride, sp + r * k, k);
    });
    at::Tensor target = out.narrow(1, start, rows);
    at::mm_out(target, x, scratch.narrow(0, 0, rows).t());
  }
}

template <class T, Half16 F>
at::Tensor widening_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor rows = x.to(at::kFloat).contiguous();
  const bool few = rows.size(0) <= kFewRows;
  at::Tensor out = at::empty({rows.size(0), weight.size(0)}, few ? x.options() : rows.options());
  if (out.numel() == 0) return out.to(x.scalar_type());
  if (few) {
    few_rows<T, F>(rows, weight, bias.defined() ? bias.const_data_ptr<float>() : nullptr, out);
    return out;
  }
  many_rows<F>(rows, weight, out);
  if (bias.defined()) out.add_(bias);
  return out.to(x.scalar_type());
}

}  // namespace

bool has_fast_matmul(at::ScalarType type);  // features.cpp

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1),
              "linear: input of shape ", x.sizes(), " does not fit a weight of shape ", weight.sizes());
  const at::ScalarType type = weight.scalar_type();
  const int64_t k = weight.size(1), count = k > 0 ? x.numel() / k : 0;
  const bool widens = (type == at::kBFloat16 || type == at::kHalf) && x.scalar_type() == type &&
                      weight.stride(1) == 1 && (count <= kFewBesideLibrary || !has_fast_matmul(type));
  if (!widens || k == 0) return at::linear(x, weight, bias);
  at::Tensor wide_bias;
  if (bias.has_value() && bias->defined()) wide_bias = bias->to(at::kFloat).contiguous();
  const at::Tensor rows = x.reshape({-1, k});
  const at::Tensor out = type == at::kBFloat16
                             ? widening_linear<c10::BFloat16, Half16::bfloat>(rows, weight, wide_bias)
                             : widening_linear<c10::Half, Half16::ieee>(rows, weight, wide_bias);
  auto shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return out.reshape(shape);
}

}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("linear", &backplane::cpu::linear);
  library.impl("logits", &backplane::cpu::linear);
}
