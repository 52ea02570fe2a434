// Implements the activation functions, plain and gated, with one loop each: widen, apply in float32, round once.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "activations.h"
#include "isa.h"
#include "rows.h"
#include "unroll.h"
#include "vector_math.h"

namespace backplane::cpu {
namespace {

// The parameters of a formula; each formula defines what a, b and c mean.
struct Numbers {
  float a = 0, b = 0, c = 0;
};

template <int W>
BACKPLANE_INLINE Floats<W> gelu_erf(Floats<W> x) {
  return 0.5f * x * (1.0f + error_function<W>(x * 0.70710678f));
}

template <int W>
BACKPLANE_INLINE Floats<W> gelu_tanh(Floats<W> x) {
  return 0.5f * x * (1.0f + hyperbolic_tangent<W>(0.79788456f * (x + 0.044715f * x * x * x)));
}

// Comparisons are written so that NaN stays NaN.
template <int W>
BACKPLANE_INLINE Floats<W> cut_above(Floats<W> x, float limit) {
  return x > limit ? all<W>(limit) : x;
}
template <int W>
BACKPLANE_INLINE Floats<W> cut_below(Floats<W> x, float limit) {
  return x < limit ? all<W>(limit) : x;
}

#define BACKPLANE_GATED(NAME, EXPRESSION)                                                         \
  struct NAME {                                                                                   \
    template <int W>                                                                              \
    static BACKPLANE_INLINE Floats<W> apply(Floats<W> g, Floats<W> u, [[maybe_unused]] Numbers n) { \
      return EXPRESSION;                                                                          \
    }                                                                                             \
  };
#define BACKPLANE_PLAIN(NAME, EXPRESSION)                     \
  struct NAME {                                               \
    template <int W>                                          \
    static BACKPLANE_INLINE Floats<W> apply(Floats<W> x) {    \
      return EXPRESSION;                                      \
    }                                                         \
  };

BACKPLANE_GATED(SiluAndMul, g * logistic<W>(g) * u)
BACKPLANE_GATED(MulAndSilu, g * (u * logistic<W>(u)))
BACKPLANE_GATED(GeluErfAndMul, gelu_erf<W>(g) * u)
BACKPLANE_GATED(GeluTanhAndMul, gelu_tanh<W>(g) * u)
BACKPLANE_GATED(FatreluAndMul, (g > n.a ? g : Floats<W>{}) * u)

// a is the limit, b alpha, c beta.
struct Swiglu {
  template <int W>
  static BACKPLANE_INLINE Floats<W> apply(Floats<W> g, Floats<W> u, Numbers n) {
    g = cut_above<W>(g, n.a);
    u = cut_above<W>(cut_below<W>(u, -n.a), n.a);
    return g * logistic<W>(n.b * g) * (u + n.c);
  }
};

// a is the limit, or infinity.
struct SwigluStep {
  template <int W>
  static BACKPLANE_INLINE Floats<W> apply(Floats<W> g, Floats<W> u, Numbers n) {
    return cut_above<W>(g * logistic<W>(g), n.a) * cut_above<W>(cut_below<W>(u, -n.a), n.a);
  }
};

// a is the limit, or infinity; b is alpha.
struct Situ {
  template <int W>
  static BACKPLANE_INLINE Floats<W> apply(Floats<W> g, Floats<W> u, Numbers n) {
    const bool bounded = n.a < std::numeric_limits<float>::infinity();
    return n.b * hyperbolic_tangent<W>(g / n.b) * logistic<W>(g) * (bounded ? n.a * hyperbolic_tangent<W>(u / n.a) : u);
  }
};

BACKPLANE_PLAIN(Silu, x * logistic<W>(x))
BACKPLANE_PLAIN(GeluErf, gelu_erf<W>(x))
BACKPLANE_PLAIN(GeluTanh, gelu_tanh<W>(x))
BACKPLANE_PLAIN(GeluFast, 0.5f * x * (1.0f + hyperbolic_tangent<W>(x * 0.7978845608f * (1.0f + 0.044715f * x * x))))
BACKPLANE_PLAIN(QuickGelu, x * logistic<W>(1.702f * x))
BACKPLANE_PLAIN(Relu2, cut_below<W>(x, 0.0f) * cut_below<W>(x, 0.0f))

template <class T, class Formula>
struct GatedRow {
  template <int W>
  static BACKPLANE_INLINE void run(const T* x, int64_t n, Numbers numbers, T* out) {
    const T* up = x + n;
    int64_t i = 0;
    // A formula is a chain of dependent operations; four independent chains keep the units busy.
    for (; i + 4 * W <= n; i += 4 * W) {
      Floats<W> result[4];
      unroll<4>(BACKPLANE_UNROLL(v) {
        result[v] = Formula::template apply<W>(read<W>(x + i + v * W), read<W>(up + i + v * W), numbers);
      });
      unroll<4>(BACKPLANE_UNROLL(v) { write<W>(out + i + v * W, result[v]); });
    }
    for (; i + W <= n; i += W)
      write<W>(out + i, Formula::template apply<W>(read<W>(x + i), read<W>(up + i), numbers));
    if (i < n) {
      const Floats<W> g = read_some<W>(x + i, n - i), u = read_some<W>(up + i, n - i);
      write_some<W>(out + i, Formula::template apply<W>(g, u, numbers), n - i);
    }
  }
};

// For an input in which gate and up elements alternate.
template <class T, class Formula>
struct AlternatingRow {
  template <int W>
  static BACKPLANE_INLINE void run(const T* x, int64_t n, Numbers numbers, T* out) {
    for (int64_t i = 0; i < n; i += W) {
      const int64_t count = n - i < W ? n - i : W;
      T gate[W] = {}, up[W] = {};
      for (int64_t k = 0; k < count; ++k) {
        gate[k] = x[2 * (i + k)];
        up[k] = x[2 * (i + k) + 1];
      }
      write_some<W>(out + i, Formula::template apply<W>(read<W>(gate), read<W>(up), numbers), count);
    }
  }
};

template <class T, class Formula>
struct PlainRow {
  template <int W>
  static BACKPLANE_INLINE void run(const T* x, int64_t n, Numbers, T* out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) write<W>(out + i, Formula::template apply<W>(read<W>(x + i)));
    if (i < n) write_some<W>(out + i, Formula::template apply<W>(read_some<W>(x + i, n - i)), n - i);
  }
};

template <template <class, class> class Row, class Formula>
at::Tensor over_rows(const char* name, const at::Tensor& x, int64_t shrink, Numbers numbers = {}) {
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) % shrink == 0, name, ": the last dimension of ", x.sizes(),
              " must be even, to hold the gate and up halves");
  auto shape = x.sizes().vec();
  shape.back() /= shrink;
  at::Tensor out = at::empty(shape, x.options());
  const int64_t n = shape.back();
  if (out.numel() == 0) return out;
  const at::Tensor from = walkable(x);
  const Rows rows = *rows_of(from);
  with_float_type(x.scalar_type(), name, [&](auto tag) {
    using T = decltype(tag);
    const T* xp = elements<T>(from);
    T* op = mutable_elements<T>(out);
    const auto apply = pick<Row<T, Formula>>();
    at::parallel_for(0, rows.count, rows_per_thread(2 * n), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) apply(xp + rows.at(r), n, numbers, op + r * n);
    });
  });
  return out;
}

bool by_tanh(const char* name, std::string_view approximate) {
  TORCH_CHECK(approximate == "none" || approximate == "tanh", name, ": unknown gelu approximation '", approximate,
              "'; use 'none' or 'tanh'");
  return approximate == "tanh";
}

at::Tensor silu_and_mul(const at::Tensor& x) { return over_rows<GatedRow, SiluAndMul>("silu_and_mul", x, 2); }

at::Tensor mul_and_silu(const at::Tensor& x) { return over_rows<GatedRow, MulAndSilu>("mul_and_silu", x, 2); }

at::Tensor gelu_and_mul(const at::Tensor& x, std::string_view approximate) {
  if (by_tanh("gelu_and_mul", approximate)) return over_rows<GatedRow, GeluTanhAndMul>("gelu_and_mul", x, 2);
  return over_rows<GatedRow, GeluErfAndMul>("gelu_and_mul", x, 2);
}

at::Tensor fatrelu_and_mul(const at::Tensor& x, double threshold) {
  return over_rows<GatedRow, FatreluAndMul>("fatrelu_and_mul", x, 2, {static_cast<float>(threshold)});
}

at::Tensor silu_and_mul_with_clamp(const at::Tensor& x, double limit, double alpha, double beta) {
  const Numbers numbers{static_cast<float>(limit), static_cast<float>(alpha), static_cast<float>(beta)};
  return over_rows<GatedRow, Swiglu>("silu_and_mul_with_clamp", x, 2, numbers);
}

at::Tensor swigluoai_and_mul(const at::Tensor& x, double alpha, double limit) {
  const Numbers numbers{static_cast<float>(limit), static_cast<float>(alpha), 1.0f};
  return over_rows<AlternatingRow, Swiglu>("swigluoai_and_mul", x, 2, numbers);
}

at::Tensor gelu(const at::Tensor& x, std::string_view approximate) {
  if (by_tanh("gelu", approximate)) return over_rows<PlainRow, GeluTanh>("gelu", x, 1);
  return over_rows<PlainRow, GeluErf>("gelu", x, 1);
}

at::Tensor gelu_new(const at::Tensor& x) { return over_rows<PlainRow, GeluTanh>("gelu_new", x, 1); }
at::Tensor gelu_fast(const at::Tensor& x) { return over_rows<PlainRow, GeluFast>("gelu_fast", x, 1); }
at::Tensor quick_gelu(const at::Tensor& x) { return over_rows<PlainRow, QuickGelu>("quick_gelu", x, 1); }
at::Tensor relu2(const at::Tensor& x) { return over_rows<PlainRow, Relu2>("relu2", x, 1); }

}  // namespace

at::Tensor activate_experts(std::string_view name, const at::Tensor& x, double alpha, std::optional<double> limit,
                            double beta) {
  const char* const op = "moe_experts";
  if (name == "silu" && !limit.has_value() && alpha == 1.0 && beta == 0.0) return silu_and_mul(x);
  const Numbers numbers{static_cast<float>(limit.value_or(std::numeric_limits<double>::infinity())),
                        static_cast<float>(alpha), static_cast<float>(beta)};
  if (name == "silu") return over_rows<GatedRow, Swiglu>(op, x, 2, numbers);
  if (name == "swigluoai") return over_rows<AlternatingRow, Swiglu>(op, x, 2, numbers);
  if (name == "swiglustep") return over_rows<GatedRow, SwigluStep>(op, x, 2, numbers);
  if (name == "situ") return over_rows<GatedRow, Situ>(op, x, 2, numbers);
  if (name == "gelu") return gelu_and_mul(x, "none");
  if (name == "gelu_tanh") return gelu_and_mul(x, "tanh");
  if (name == "silu_no_mul") return over_rows<PlainRow, Silu>(op, x, 1);
  if (name == "gelu_no_mul") return gelu(x, "none");
  if (name == "gelu_tanh_no_mul") return gelu(x, "tanh");
  if (name == "relu2_no_mul") return relu2(x);
  TORCH_CHECK(false, op, ": unknown activation '", name, "'; the documentation of moe_experts lists the names");
}

}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("silu_and_mul", &backplane::cpu::silu_and_mul);
  library.impl("mul_and_silu", &backplane::cpu::mul_and_silu);
  library.impl("gelu_and_mul", &backplane::cpu::gelu_and_mul);
  library.impl("fatrelu_and_mul", &backplane::cpu::fatrelu_and_mul);
  library.impl("silu_and_mul_with_clamp", &backplane::cpu::silu_and_mul_with_clamp);
  library.impl("swigluoai_and_mul", &backplane::cpu::swigluoai_and_mul);
  library.impl("gelu", &backplane::cpu::gelu);
  library.impl("gelu_new", &backplane::cpu::gelu_new);
  library.impl("gelu_fast", &backplane::cpu::gelu_fast);
  library.impl("quick_gelu", &backplane::cpu::quick_gelu);
  library.impl("relu2", &backplane::cpu::relu2);
}
