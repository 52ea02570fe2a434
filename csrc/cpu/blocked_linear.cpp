// Linear layers whose weight was rearranged once, after loading, into the order in which the product reads it.
//
// See blocked_linear.h for the arrangement. Up to a few parts of x, a part being the rows of one product, the weight is
// read from memory as it is. For more, a chunk of a block is widened into memory that stays in the first cache while
// every part is multiplied by it, and as many parts take part as stay in the second.

#include "blocked_linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <array>
#include <vector>

#include "rows.h"
#include "tiling.h"
#include "transpose.h"

namespace backplane::cpu {
namespace {

template <class T>
using Product = void (*)(const float*, int64_t, const T*, int64_t, float*, bool);
template <class T>
using Products = std::array<Product<T>, kMostRows>;  // by number of rows, less one

template <class T, bool Rearranged, size_t... I>
Products<T> products_for(std::index_sequence<I...>) {
  return {pick<BlockProduct<int(I) + 1, T, Rearranged>>()...};
}

template <class T, bool Rearranged>
Products<T> products() {
  return products_for<T, Rearranged>(std::make_index_sequence<kMostRows>{});
}

constexpr int64_t kMostWidth = 32;
constexpr int64_t kLine = 64;  // bytes that memory gives at once

struct Geometry {
  int64_t lanes;      // of a vector
  int64_t width;      // of a block
  int64_t most_rows;  // of a product
};

template <int W>
constexpr Geometry geometry_of() {
  return {W, block_vectors<W>() * W, most_rows<W>()};
}

Geometry geometry() {
  if (isa() == Isa::avx512) return geometry_of<16>();
  if (isa() == Isa::avx2) return geometry_of<8>();
  return geometry_of<4>();
}

template <class T>
struct WidenBlock {
  template <int W>
  static BACKPLANE_INLINE void run(const T* from, float* to, int64_t k) {
    constexpr int V = block_vectors<W>();
    for (int64_t i = 0; i < k; ++i) {
      Floats<W> columns[V];
      read_columns<W, V>(from + i * (V * W), columns);
      each<V>(BACKPLANE_EACH(v) { store<W>(to + (i * V + v) * W, columns[v]); });
    }
  }
};

// A part of x as [k][row]: its numbers lie in the order of their use, and not all in one set of the cache.
template <class T>
struct Rearrange {
  template <int W>
  static BACKPLANE_INLINE void run(const T* from, int64_t rows, int64_t k, float* to) {
    constexpr int Groups = (most_rows<W>() + W - 1) / W;
    int64_t i = 0;
    // A vector may reach over the end of its step, into what the next step writes, but not over the end of the part.
    for (; (i + W - 1) * rows + Groups * W <= k * rows; i += W) {
      Floats<W> columns[Groups][W];
      for (int group = 0; group < Groups; ++group) {
        for (int r = 0; r < W; ++r) {
          const int64_t row = group * W + r;
          columns[group][r] = read<W>(from + (row < rows ? row : 0) * k + i);
        }
        transpose<W>(columns[group]);
      }
      for (int step = 0; step < W; ++step)
        for (int group = 0; group < Groups && group * W < rows; ++group)
          store<W>(to + (i + step) * rows + group * W, columns[group][step]);
    }
    for (; i < k; ++i)
      for (int64_t r = 0; r < rows; ++r) to[i * rows + r] = static_cast<float>(from[r * k + i]);
  }
};

template <class T>
at::Tensor rearranged(const at::Tensor& x, const Parts& parts) {
  const int64_t k = x.size(1);
  at::Tensor result = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  const T* from = elements<T>(x);
  float* to = result.mutable_data_ptr<float>();
  const auto rearrange = pick<Rearrange<T>>();
  at::parallel_for(0, parts.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t offset = parts.begin(part) * k;
      rearrange(from + offset, parts.size(part), k, to + offset);
    }
  });
  return result;
}

// Few rows: every weight is used once or twice, so it goes from memory into the registers.
template <class Weight, class Result>
void multiply_few(const at::Tensor& x, const Parts& parts, const at::Tensor& blocks, const float* bias, at::Tensor& out) {
  const int64_t k = x.size(1), n = out.size(1), width = geometry().width;
  const at::Tensor inputs = x.to(at::kFloat);
  const float* xp = inputs.const_data_ptr<float>();
  const Weight* wp = elements<Weight>(blocks);
  Result* op = mutable_elements<Result>(out);
  const Products<Weight> product = products<Weight, false>();
  const auto write_row = pick<Finish<Result>>();
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, k * width * x.size(0)));
  at::parallel_for(0, blocks.size(0), grain, [&](int64_t first, int64_t last) {
    alignas(64) float tile[kMostRows * kMostWidth];
    for (int64_t index = first; index < last; ++index) {
      const int64_t column = index * width, columns = std::min(width, n - column);
      for (int64_t part = 0; part < parts.count; ++part) {
        const int64_t begin = parts.begin(part), rows = parts.size(part);
        product[rows - 1](xp + begin * k, k, wp + index * k * width, k, tile, false);
        for (int64_t r = 0; r < rows; ++r)
          write_row(tile + r * width, bias ? bias + column : nullptr, op + (begin + r) * n + column, columns);
      }
    }
  });
}

template <class Weight, class Result>
void multiply_many(const at::Tensor& x, const Parts& parts, const at::Tensor& blocks, const float* bias,
                   at::Tensor& out) {
  const int64_t m = x.size(0), k = x.size(1), n = out.size(1), width = geometry().width;
  const at::Tensor inputs = rearranged<Result>(x, parts);
  const float* xp = inputs.const_data_ptr<float>();
  const Weight* wp = elements<Weight>(blocks);
  Result* op = mutable_elements<Result>(out);
  const Products<float> product = products<float, true>();
  const auto widen = pick<WidenBlock<Weight>>();
  const auto write_row = pick<Finish<Result>>();
  // Two thirds: a part of x passes through the same cache.
  const Parts chunks(k, std::max<int64_t>(1, chunk_bytes() * 2 / 3 / (width * 4)));
  const int64_t part_bytes = std::max<int64_t>(1, m / parts.count * k * 4);
  const int64_t slice = std::min(parts.count, std::max<int64_t>(4, input_bytes() / part_bytes));  // parts
  constexpr int64_t tile_size = kMostRows * kMostWidth;
  at::parallel_for(0, blocks.size(0), 1, [&](int64_t first, int64_t last) {
    std::vector<Line> tiles(slice * tile_size / 16);
    std::vector<Line> wide((chunks.size(chunks.count - 1) + 1) * width / 16 + 1);
    for (int64_t top = 0; top < parts.count; top += slice) {
      const int64_t bottom = std::min(top + slice, parts.count);
      for (int64_t index = first; index < last; ++index) {
        const int64_t column = index * width, columns = std::min(width, n - column);
        for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
          const int64_t step = chunks.begin(chunk), steps = chunks.size(chunk);
          const Weight* block = wp + (index * k + step) * width;
          const float* ready = wide.data()->floats;
          if constexpr (std::is_same_v<Weight, float>) ready = block;
          else widen(block, wide.data()->floats, steps);
          // What memory is asked for during the products is there after them: the weights that follow, and the places
          // of results, which lie in as many pages as there are rows.
          const char* following = reinterpret_cast<const char*>(block + steps * width);
          const int64_t share = (steps * width * int64_t(sizeof(Weight)) / (bottom - top) / kLine + 1) * kLine;
          const bool last_chunk = chunk + 1 == chunks.count;
          for (int64_t part = top; part < bottom; ++part) {
            const int64_t begin = parts.begin(part), rows = parts.size(part);
            float* tile = tiles.data()->floats + (part - top) * tile_size;
            Result* results = op + begin * n + column;
            for (int64_t line = 0; line < share; line += kLine)
              __builtin_prefetch(following + (part - top) * share + line, 0, 2);
            for (int64_t r = 0; last_chunk && r < rows; ++r) __builtin_prefetch(results + r * n, 1);
            product[rows - 1](xp + begin * k + step * rows, 0, ready, steps, tile, chunk > 0);
            for (int64_t r = 0; last_chunk && r < rows; ++r)
              write_row(tile + r * width, bias ? bias + column : nullptr, results + r * n, columns);
          }
        }
      }
    }
  });
}

// x and the result are of one type.
template <class Weight, class Result>
void multiply(const at::Tensor& x, const at::Tensor& blocks, const float* bias, at::Tensor& out) {
  const Parts parts(x.size(0), geometry().most_rows);
  if (parts.count > 2) multiply_many<Weight, Result>(x, parts, blocks, bias, out);
  else multiply_few<Weight, Result>(x, parts, blocks, bias, out);
}

// Whether the blocks lie in memory as the products read them.
bool fits(const at::Tensor& blocks, int64_t out_features) {
  const auto [lanes, width, most_rows] = geometry();
  const int64_t k = blocks.size(-1);
  std::vector<int64_t> sizes{blocks.size(0), width, k}, strides{k * width, 1, width};
  if (blocks.scalar_type() != at::kFloat) {
    sizes = {blocks.size(0), width / (2 * lanes), 2, lanes, k};
    strides = {k * width, 2 * lanes, 1, 2, width};
  }
  if (blocks.sizes() != sizes || blocks.size(0) != (out_features + width - 1) / width) return false;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && blocks.stride(d) != strides[d]) return false;
  return true;
}

}  // namespace

bool has_fast_matmul(at::ScalarType type);  // features.cpp

at::Tensor blocked_linear(const at::Tensor& x, const at::Tensor& blocks, int64_t out_features,
                          const std::optional<at::Tensor>& bias) {
  const int64_t k = blocks.dim() > 0 ? blocks.size(-1) : 0;
  TORCH_CHECK(blocks.dim() >= 2 && out_features >= 0 && out_features * k <= blocks.numel(), "blocked_linear: ",
              blocks.sizes(), " is not the blocks of ", out_features, " rows");
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == k, "blocked_linear: input of ", x.sizes(), " does not fit a weight of ",
              out_features, " x ", k);
  TORCH_CHECK(is_float_type(x.scalar_type()) && is_float_type(blocks.scalar_type()),
              "blocked_linear: ", x.scalar_type(), " times ", blocks.scalar_type(), " is not supported");
  if (!fits(blocks, out_features)) {
    TORCH_WARN_ONCE("blocked_linear: the weight is arranged for other registers than this machine's, and is copied at "
                    "every call; arrange it with Device.arrange_linear");
    return at::linear(x, blocks.reshape({-1, k}).narrow(0, 0, out_features).to(x.scalar_type()), bias);
  }
  const at::Tensor rows = x.reshape({-1, k}).contiguous();
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

// Rows of a block, and of one vector in it, that the products of this machine are written for.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_block_width() {
  return static_cast<int>(backplane::cpu::geometry().width);
}
extern "C" __attribute__((visibility("default"))) int backplane_cpu_block_lanes() {
  return static_cast<int>(backplane::cpu::geometry().lanes);
}

// Whether weights of a type (0 float32, 1 bfloat16, 2 float16) are multiplied faster in blocks than by PyTorch.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_wants_blocks(int type) {
  using backplane::cpu::has_fast_matmul;
  return (type == 1 && !has_fast_matmul(at::kBFloat16)) || (type == 2 && !has_fast_matmul(at::kHalf));
}
