// Linear layers whose weight was rearranged once, after loading, into the order in which the product reads it.
//
// See blocked_linear.h for the arrangement. Up to a few blocks of rows the weight is read from memory as it is; for more,
// a block of 16-bit weights is widened once into memory that stays in the cache, and every block of rows uses that.

#include "blocked_linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <array>
#include <vector>

#include "rows.h"

namespace backplane::cpu {
namespace {

template <class T>
using Product = void (*)(const float*, int64_t, const T*, int64_t, float*);
template <class T>
using Products = std::array<Product<T>, kMostRows>;  // by number of rows, less one

template <class T, size_t... I>
Products<T> products_for(std::index_sequence<I...>) {
  return {pick<BlockProduct<int(I) + 1, T>>()...};
}

template <class T>
Products<T> products() {
  return products_for<T>(std::make_index_sequence<kMostRows>{});
}

struct Geometry {
  int64_t width;      // of a block
  int64_t most_rows;  // of a product
};

template <int W>
constexpr Geometry geometry_of() {
  return {block_vectors<W>() * W, most_rows<W>()};
}

Geometry geometry() {
  if (isa() == Isa::avx512) return geometry_of<16>();
  if (isa() == Isa::avx2) return geometry_of<8>();
  return geometry_of<4>();
}

template <class T>
struct WidenBlock {
  template <int W>
  static BACKPLANE_INLINE void run(const T* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += W) store<W>(to + i, read<W>(from + i));  // a block is whole vectors
  }
};

// A row of the tile, with its bias, in the type of the result; `count` may end inside the last vector.
template <class T>
struct Finish {
  template <int W>
  static BACKPLANE_INLINE void run(const float* tile, const float* bias, T* to, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) {
      const Floats<W> sums = load<W>(tile + i);
      write<W>(to + i, bias ? sums + load<W>(bias + i) : sums);
    }
    if (i < count) {
      const Floats<W> sums = load<W>(tile + i);
      write_some<W>(to + i, bias ? sums + read_some<W>(bias + i, count - i) : sums, count - i);
    }
  }
};

// Rows in parts of nearly one size: fifteen as eight and seven rather than fourteen and one.
template <class T>
void times_block(const float* x, int64_t m, int64_t k, int64_t most, const T* block, const Products<T>& products,
                 const auto& finish) {
  alignas(64) float tile[kMostRows * 2 * 16];
  const int64_t parts = (m + most - 1) / most;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * m / parts, rows = (part + 1) * m / parts - begin;
    products[rows - 1](x + begin * k, k, block, k, tile);
    finish(begin, rows, tile);
  }
}

template <class Weight, class Result>
void multiply(const at::Tensor& x, const at::Tensor& blocks, const float* bias, at::Tensor& out) {
  const int64_t m = x.size(0), k = x.size(1), n = out.size(1), width = blocks.size(1);
  const int64_t most = geometry().most_rows;
  const float* xp = x.const_data_ptr<float>();
  const Weight* wp = elements<Weight>(blocks);
  Result* op = mutable_elements<Result>(out);
  const Products<Weight> direct = products<Weight>();
  const Products<float> widened = products<float>();
  const auto widen = pick<WidenBlock<Weight>>();
  const auto write_row = pick<Finish<Result>>();
  const bool reuse = sizeof(Weight) < sizeof(float) && m > 2 * most;
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, k * width * m));
  at::parallel_for(0, blocks.size(0), grain, [&](int64_t first, int64_t last) {
    std::vector<float> scratch(reuse ? k * width : 0);
    for (int64_t index = first; index < last; ++index) {
      const int64_t column = index * width, columns = std::min(width, n - column);
      const auto finish = [&](int64_t begin, int64_t rows, const float* tile) {
        for (int64_t r = 0; r < rows; ++r)
          write_row(tile + r * width, bias ? bias + column : nullptr, op + (begin + r) * n + column, columns);
      };
      const Weight* block = wp + index * k * width;
      if (reuse) {
        widen(block, scratch.data(), k * width);
        times_block<float>(xp, m, k, most, scratch.data(), widened, finish);
      } else {
        times_block<Weight>(xp, m, k, most, block, direct, finish);
      }
    }
  });
}

}  // namespace

bool has_fast_matmul(at::ScalarType type);  // features.cpp

at::Tensor blocked_linear(const at::Tensor& x, const at::Tensor& blocks, int64_t out_features,
                          const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(blocks.dim() == 3 && out_features >= 0 && out_features <= blocks.size(0) * blocks.size(1),
              "blocked_linear: ", blocks.sizes(), " is not the blocks of ", out_features, " rows");
  const int64_t count = blocks.size(0), width = blocks.size(1), k = blocks.size(2);
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == k, "blocked_linear: input of ", x.sizes(), " does not fit a weight of ",
              out_features, " x ", k);
  TORCH_CHECK(is_float_type(x.scalar_type()) && is_float_type(blocks.scalar_type()),
              "blocked_linear: ", x.scalar_type(), " times ", blocks.scalar_type(), " is not supported");
  const bool transposed = blocks.stride(1) == 1 && (blocks.stride(2) == width || k <= 1) &&
                          (blocks.stride(0) == width * k || count <= 1);
  if (width != geometry().width || !transposed || count != (out_features + width - 1) / width)
    // Blocks made for another machine's registers.
    return at::linear(x, blocks.reshape({-1, k}).narrow(0, 0, out_features).to(x.scalar_type()), bias);
  const at::Tensor rows = x.reshape({-1, k}).to(at::kFloat).contiguous();
  at::Tensor out = at::empty({rows.size(0), out_features}, x.options());
  at::Tensor wide_bias;
  if (bias.has_value() && bias->defined()) wide_bias = bias->to(at::kFloat).contiguous();
  if (out.numel() > 0)
    with_float_type(blocks.scalar_type(), "blocked_linear", [&](auto weight) {
      return with_float_type(x.scalar_type(), "blocked_linear", [&](auto result) {
        multiply<decltype(weight), decltype(result)>(
            rows, blocks, wide_bias.defined() ? wide_bias.const_data_ptr<float>() : nullptr, out);
        return 0;
      });
    });
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  return out.reshape(shape);
}

}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("blocked_linear", &backplane::cpu::blocked_linear);
}

// Rows of a block that the products of this machine are written for.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_block_width() {
  return static_cast<int>(backplane::cpu::geometry().width);
}

// Whether weights of a type (0 float32, 1 bfloat16, 2 float16) are multiplied faster in blocks than by PyTorch.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_wants_blocks(int type) {
  using backplane::cpu::has_fast_matmul;
  return (type == 1 && !has_fast_matmul(at::kBFloat16)) || (type == 2 && !has_fast_matmul(at::kHalf));
}
