// Implements RMS normalization: one pass for the sum of squares and one for the result, both from the L1 cache.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "isa.h"
#include "rows.h"

namespace backplane::cpu {
namespace {

// The way the weight is applied: rounded to its own type as the operator defines it, or 1 + weight in float32 (Gemma).
enum class Style { plain, gemma };

// Computes total[i] = x[i] + residual[i], kept in float32 for the norm.
template <class T>
struct AddRow {
  template <int W>
  static BACKPLANE_INLINE void run(const T* x, const T* residual, int64_t n, float* wide, T* total) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      const Floats<W> v = read<W>(x + i) + read<W>(residual + i);
      store<W>(wide + i, v);
      write<W>(total + i, v);
    }
    if (i < n) {
      const Floats<W> v = read_some<W>(x + i, n - i) + read_some<W>(residual + i, n - i);
      write_some<W>(wide + i, v, n - i);
      write_some<W>(total + i, v, n - i);
    }
  }
};

// Computes out = x / rms(x[:measured]) * weight. X is the type of the row, T that of the result.
template <class X, class T, class Weight, Style S>
struct NormRow {
  template <int W>
  static BACKPLANE_INLINE Floats<W> weighted(Floats<W> v, Floats<W> weight) {
    if constexpr (S == Style::gemma) return v * (1.0f + weight);
    v = rounded_to<W, Weight>(v) * weight;
    return std::is_same_v<Weight, T> ? v : rounded_to<W, Weight>(v);
  }

  template <int W>
  static BACKPLANE_INLINE void run(const X* x, const Weight* weight, int64_t n, int64_t measured, float eps, T* out) {
    Floats<W> squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= measured; i += 2 * W) {
      const Floats<W> a = read<W>(x + i), b = read<W>(x + i + W);
      squares[0] += a * a;
      squares[1] += b * b;
    }
    for (; i + W <= measured; i += W) {
      const Floats<W> a = read<W>(x + i);
      squares[0] += a * a;
    }
    if (i < measured) {
      const Floats<W> a = read_some<W>(x + i, measured - i);
      squares[1] += a * a;
    }
    const float scale = 1.0f / std::sqrt(sum<W>(squares[0] + squares[1]) / static_cast<float>(measured) + eps);
    i = 0;
    if (weight == nullptr) {
      for (; i + W <= n; i += W) write<W>(out + i, read<W>(x + i) * scale);
      if (i < n) write_some<W>(out + i, read_some<W>(x + i, n - i) * scale, n - i);
      return;
    }
    for (; i + W <= n; i += W) write<W>(out + i, weighted<W>(read<W>(x + i) * scale, read<W>(weight + i)));
    if (i < n) {
      const Floats<W> v = weighted<W>(read_some<W>(x + i, n - i) * scale, read_some<W>(weight + i, n - i));
      write_some<W>(out + i, v, n - i);
    }
  }
};

// Handles combinations that no known model uses: types that differ, weights that are not a contiguous row.
at::Tensor by_formula(const at::Tensor& wide, const std::optional<at::Tensor>& weight, double eps, int64_t measured,
                      at::ScalarType type, Style style) {
  const at::Tensor mean = wide.narrow(-1, 0, measured).square().mean(-1, true);
  const at::Tensor normal = wide.mul(mean.add(eps).rsqrt());
  if (!weight) return normal.to(type);
  if (style == Style::gemma) return normal.mul(weight->to(at::kFloat).add(1.0)).to(type);
  return normal.to(weight->scalar_type()).mul(*weight).to(type);
}

struct Result {
  at::Tensor out, total;
};

template <class T, class Weight, Style S>
Result normalize(const at::Tensor& x, const at::Tensor* residual, const at::Tensor* weight, double eps,
                 int64_t measured) {
  // The result has the strides that PyTorch's own arithmetic would give it.
  const auto alike = [&x] { return x.is_contiguous() ? at::empty(x.sizes(), x.options()) : at::empty_like(x); };
  Result result{alike(), residual ? alike() : at::Tensor()};
  const int64_t n = x.size(-1);
  if (x.numel() == 0) return result;
  const at::Tensor from = walkable(x), added = residual ? walkable(*residual) : at::Tensor();
  const at::Tensor scale = weight ? weight->contiguous() : at::Tensor();
  // Results that Rows cannot address are computed elsewhere and copied.
  const at::Tensor out = rows_of(result.out) ? result.out : at::empty(x.sizes(), x.options());
  const at::Tensor total = !residual || rows_of(result.total) ? result.total : at::empty(x.sizes(), x.options());
  const Rows rows = *rows_of(from), out_rows = *rows_of(out);
  const T* xp = elements<T>(from);
  T* op = mutable_elements<T>(out);
  const Weight* wp = weight ? elements<Weight>(scale) : nullptr;
  if (residual) {
    const Rows added_rows = *rows_of(added), total_rows = *rows_of(total);
    const T* rp = elements<T>(added);
    T* tp = mutable_elements<T>(total);
    const auto add = pick<AddRow<T>>();
    const auto norm = pick<NormRow<float, T, Weight, S>>();
    at::parallel_for(0, rows.count, rows_per_thread(2 * n), [&](int64_t begin, int64_t end) {
      std::vector<float> wide(n);
      for (int64_t r = begin; r < end; ++r) {
        add(xp + rows.at(r), rp + added_rows.at(r), n, wide.data(), tp + total_rows.at(r));
        norm(wide.data(), wp, n, measured, static_cast<float>(eps), op + out_rows.at(r));
      }
    });
    if (!total.is_same(result.total)) result.total.copy_(total);
  } else {
    const auto norm = pick<NormRow<T, T, Weight, S>>();
    at::parallel_for(0, rows.count, rows_per_thread(n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        norm(xp + rows.at(r), wp, n, measured, static_cast<float>(eps), op + out_rows.at(r));
    });
  }
  if (!out.is_same(result.out)) result.out.copy_(out);
  return result;
}

template <Style S>
Result dispatch(const char* name, const at::Tensor& x, const at::Tensor* residual,
                const std::optional<at::Tensor>& weight, double eps, std::optional<int64_t> variance_size) {
  TORCH_CHECK(x.dim() >= 1, name, ": x must have at least one dimension, got a scalar");
  const int64_t n = x.size(-1), measured = std::min(n, variance_size.value_or(n));
  TORCH_CHECK(measured > 0 || n == 0, name, ": variance_size is ", measured, "; it must be positive");
  TORCH_CHECK(!residual || residual->sizes() == x.sizes(), name, ": residual has shape ", residual->sizes(),
              " and x has shape ", x.sizes(), "; they must be equal");
  TORCH_CHECK(!weight || (weight->dim() == 1 && weight->size(0) == n), name, ": weight has shape ", weight->sizes(),
              "; it must be [", n, "]");
  const at::ScalarType type = x.scalar_type();
  const at::ScalarType weight_type = weight ? weight->scalar_type() : type;
  const bool direct = is_float_type(type) && (weight_type == type || weight_type == at::kFloat) &&
                      (!residual || residual->scalar_type() == type);
  if (!direct) {
    const at::Tensor wide = residual ? x.to(at::kFloat).add(residual->to(at::kFloat)) : x.to(at::kFloat);
    return {by_formula(wide, weight, eps, measured, type, S), residual ? wide.to(type) : at::Tensor()};
  }
  const at::Tensor* scale = weight ? &*weight : nullptr;
  return with_float_type(type, name, [&](auto tag) -> Result {
    using T = decltype(tag);
    if (weight_type == type) return normalize<T, T, S>(x, residual, scale, eps, measured);
    return normalize<T, float, S>(x, residual, scale, eps, measured);
  });
}

at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps,
                    std::optional<int64_t> variance_size) {
  return dispatch<Style::plain>("rms_norm", x, nullptr, weight, eps, variance_size).out;
}

std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                      const std::optional<at::Tensor>& weight, double eps,
                                                      std::optional<int64_t> variance_size) {
  Result result = dispatch<Style::plain>("fused_add_rms_norm", x, &residual, weight, eps, variance_size);
  return {result.out, result.total};
}

at::Tensor gemma_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return dispatch<Style::gemma>("gemma_rms_norm", x, nullptr, weight, eps, std::nullopt).out;
}

std::tuple<at::Tensor, at::Tensor> fused_add_gemma_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps) {
  Result result = dispatch<Style::gemma>("fused_add_gemma_rms_norm", x, &residual, weight, eps, std::nullopt);
  return {result.out, result.total};
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("rms_norm", &backplane::cpu::rms_norm);
  library.impl("fused_add_rms_norm", &backplane::cpu::fused_add_rms_norm);
  library.impl("gemma_rms_norm", &backplane::cpu::gemma_rms_norm);
  library.impl("fused_add_gemma_rms_norm", &backplane::cpu::fused_add_gemma_rms_norm);
}
