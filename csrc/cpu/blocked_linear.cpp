// Multiplies by weights that were rearranged once, after loading, into the order in which the GEMM reads them.
//
// blocked_linear.h describes the layout. The rows of x are cut into parts, the rows that one inner product takes. With
// few parts, the weight is read from memory as it is. With more, a chunk of a panel, which is one or two blocks, is
// widened into a buffer in the L1 cache and multiplied by every part, with as many parts as stay in the L2 cache.

#include "blocked_linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <vector>

#include "rows.h"
#include "tiling.h"
#include "transpose.h"

namespace backplane::cpu {
namespace {

template <class T>
using Product = void (*)(const float*, int64_t, const T*, int64_t, int64_t, float*, bool);
template <class T, int Most>
using Products = std::array<Product<T>, Most>;  // by number of rows, minus one

template <class T, int Blocks, bool Rearranged, size_t... I>
Products<T, sizeof...(I)> products_for(std::index_sequence<I...>) {
  return {pick<BlockProduct<int(I) + 1, T, Blocks, Rearranged>>()...};
}

// Returns the inner products for a few rows by weights as they lie in memory; panel_products() returns those for the
// parts of many rows by widened blocks.
template <class T>
Products<T, kMostRows> products() {
  return products_for<T, 1, false>(std::make_index_sequence<kMostRows>{});
}
template <int Blocks>
Products<float, kPanelRows> panel_products() {
  return products_for<float, Blocks, true>(std::make_index_sequence<kPanelRows>{});
}

constexpr int64_t kMostWidth = 32;
constexpr int64_t kLine = 64;  // bytes of a cache line

struct Geometry {
  int64_t lanes;      // of a vector
  int64_t width;      // columns of a block
  int64_t most_rows;  // rows of an inner product that reads weights from memory
  int64_t panel;      // blocks that many rows are multiplied by at once
};

template <int W>
constexpr Geometry geometry_of() {
  return {W, block_vectors<W>() * W, most_rows<W>(), panel_blocks<W>()};
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
      unroll<V>(BACKPLANE_UNROLL(v) { store<W>(to + (i * V + v) * W, columns[v]); });
    }
  }
};

// Returns vector `Part` of three interleaved vectors: a0 b0 c0 a1 b1 c1 …
template <int W, int Part, int... J>
BACKPLANE_INLINE Words<W> in_turn(const Floats<W> (&from)[3], std::integer_sequence<int, J...>) {
  const auto two = choose<W, ((Part * W + J) % 3 == 1 ? W + (Part * W + J) / 3 : (Part * W + J) / 3)...>(from[0], from[1]);
  return bits_as<Words<W>>(choose<W, ((Part * W + J) % 3 == 2 ? W + (Part * W + J) / 3 : J)...>(two, from[2]));
}

// Returns the numbers in half `Part` of a vector of pairs, in order.
template <int W, class T, int Part, int... J>
BACKPLANE_INLINE Floats<W> unpaired(Words<W> pairs, std::integer_sequence<int, J...>) {
  const Floats<W> from = bits_as<Floats<W>>(pairs);
  const Words<W> twice = bits_as<Words<W>>(choose<W, (Part * W / 2 + J / 2)...>(from, from));
  if constexpr (std::is_same_v<T, c10::BFloat16>)
    return bits_as<Floats<W>>(Words<W>((twice << Words<W>{(J % 2 ? 0u : 16u)...}) & 0xffff0000u));
  else
    return widen_ieee<W>((twice >> Words<W>{(J % 2 ? 16u : 0u)...}) & 0xffffu);
}

// Rearranges a part of x to [k][row]: numbers then lie in the order of use and do not compete for one set of the cache.
template <class T>
struct Rearrange {
  template <int W>
  static BACKPLANE_INLINE void run(const T* from, int64_t rows, int64_t k, float* to) {
    int64_t i = 0;
    // Six rows are less than half of a square of 16-bit vectors; they are moved as pairs instead.
    if constexpr (sizeof(T) == 2 && W > 2 * kPanelRows)
      if (rows == kPanelRows)
        for (; i + W <= k; i += W) six_as_pairs<W>(from + i, k, to + i * kPanelRows);
    i = by_squares<W>(from, rows, k, i, to);
    for (; i < k; ++i)
      for (int64_t r = 0; r < rows; ++r) to[i * rows + r] = static_cast<float>(from[r * k + i]);
  }

 private:
  template <int W>
  static BACKPLANE_INLINE void six_as_pairs(const T* from, int64_t k, float* to) {
    static_assert(kPanelRows == 6);
    constexpr std::make_integer_sequence<int, W> lanes;
    Floats<W> pairs[3];
    unroll<3>(BACKPLANE_UNROLL(p) {
      Shorts<W> even, odd;
      std::memcpy(&even, from + 2 * p * k, sizeof even);
      std::memcpy(&odd, from + (2 * p + 1) * k, sizeof odd);
      pairs[p] = bits_as<Floats<W>>(Words<W>(__builtin_convertvector(even, Words<W>) |
                                             __builtin_convertvector(odd, Words<W>) << 16));
    });
    unroll<3>(BACKPLANE_UNROLL(p) {
      const Words<W> words = in_turn<W, p>(pairs, lanes);
      store<W>(to + 2 * p * W, unpaired<W, T, 0>(words, lanes));
      store<W>(to + (2 * p + 1) * W, unpaired<W, T, 1>(words, lanes));
    });
  }

  template <int W>
  static BACKPLANE_INLINE int64_t by_squares(const T* from, int64_t rows, int64_t k, int64_t i, float* to) {
    constexpr int Groups = (kPanelRows + W - 1) / W;
    // A vector may extend past its step, into what the next step writes, but not past the end of the part.
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
    return i;
  }
};

// Multiplies few rows: every weight is used once or twice, so it goes from memory straight into registers.
template <class Weight, class Result>
void multiply_few(const at::Tensor& x, const Parts& parts, const at::Tensor& blocks, const float* bias, at::Tensor& out) {
  const int64_t k = x.size(1), n = out.size(1), width = geometry().width;
  const at::Tensor inputs = x.to(at::kFloat);
  const float* xp = inputs.const_data_ptr<float>();
  const Weight* wp = elements<Weight>(blocks);
  Result* op = mutable_elements<Result>(out);
  const auto product = products<Weight>();
  const auto write_row = pick<Finish<Result>>();
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, k * width * x.size(0)));
  at::parallel_for(0, blocks.size(0), grain, [&](int64_t first, int64_t last) {
    alignas(64) float tile[kMostRows * kMostWidth];
    for (int64_t index = first; index < last; ++index) {
      const int64_t column = index * width, columns = std::min(width, n - column);
      for (int64_t part = 0; part < parts.count; ++part) {
        const int64_t begin = parts.begin(part), rows = parts.size(part);
        product[rows - 1](xp + begin * k, k, wp + index * k * width, 0, k, tile, false);
        for (int64_t r = 0; r < rows; ++r)
          write_row(tile + r * width, bias ? bias + column : nullptr, op + (begin + r) * n + column, columns);
      }
    }
  });
}

// Divides a GEMM of many rows among threads. Threads that share columns rearrange the same rows of x; threads that
// share rows widen the same weights. Rearranging costs more, so rows are divided as long as every thread gets enough
// rows to make widening cheap.
struct Shares {
  int64_t rows, columns;

  Shares(int64_t m, int64_t threads) : rows(threads) {
    constexpr int64_t enough = 64;
    while (rows > 1 && (threads % rows != 0 || m / rows < enough)) --rows;
    columns = threads / rows;
  }
};

// Multiplies many rows of x, in parts of a few, by some blocks of the weight.
template <class Weight, class Result>
struct ManyRows {
  const Result* x;
  const Weight* blocks;
  const float* bias;
  Result* out;
  int64_t k, n;
  const Parts& parts;
  Geometry geometry = cpu::geometry();
  // Two thirds, because a part of x passes through the same cache.
  Parts chunks{k, std::max<int64_t>(1, chunk_bytes() * 2 / 3 / (geometry.panel * geometry.width * 4))};
  std::array<Products<float, kPanelRows>, kMostPanelBlocks> products{panel_products<1>(), panel_products<2>()};
  void (*rearrange)(const Result*, int64_t, int64_t, float*) = pick<Rearrange<Result>>();
  void (*widen)(const Weight*, float*, int64_t) = pick<WidenBlock<Weight>>();
  void (*write_row)(const float*, const float*, Result*, int64_t) = pick<Finish<Result>>();

  int64_t tile_size() const { return kPanelRows * geometry.panel * geometry.width; }

  // `inputs` has room for the parts from top to bottom, which stay in the L2 cache.
  void multiply(int64_t top, int64_t bottom, int64_t first, int64_t last, float* inputs) const {
    const int64_t width = geometry.width, before = parts.begin(top);
    for (int64_t part = top; part < bottom; ++part) {
      const int64_t begin = parts.begin(part);
      rearrange(x + begin * k, parts.size(part), k, inputs + (begin - before) * k);
    }
    std::vector<Line> tiles((bottom - top) * tile_size() / 16);
    std::vector<Line> wide((chunks.size(chunks.count - 1) + 1) * geometry.panel * width / 16 + 1);
    for (int64_t index = first; index < last; index += geometry.panel) {
      const int64_t panel = std::min(geometry.panel, last - index);
      const int64_t column = index * width, columns = std::min(panel * width, n - column);
      for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
        const int64_t step = chunks.begin(chunk), steps = chunks.size(chunk);
        const Weight* block = blocks + (index * k + step) * width;
        const float* ready = wide.data()->floats;
        int64_t stride = steps * width;
        if constexpr (std::is_same_v<Weight, float>) {
          ready = block;
          stride = k * width;
        } else {
          for (int64_t b = 0; b < panel; ++b) widen(block + b * k * width, wide.data()->floats + b * stride, steps);
        }
        // Prefetches during the multiplications what is needed after them: the weights that follow, and the
        // destinations of results, which lie in as many pages as there are rows.
        const int64_t share = (steps * width * int64_t(sizeof(Weight)) / (bottom - top) / kLine + 1) * kLine;
        const bool last_chunk = chunk + 1 == chunks.count;
        for (int64_t part = top; part < bottom; ++part) {
          const int64_t begin = parts.begin(part), rows = parts.size(part);
          float* tile = tiles.data()->floats + (part - top) * tile_size();
          Result* results = out + begin * n + column;
          for (int64_t b = 0; b < panel; ++b) {
            const char* following = reinterpret_cast<const char*>(block + b * k * width + steps * width);
            for (int64_t line = 0; line < share; line += kLine)
              __builtin_prefetch(following + (part - top) * share + line, 0, 2);
          }
          for (int64_t r = 0; last_chunk && r < rows; ++r)
            for (int64_t i = 0; i < columns; i += kLine / int64_t(sizeof(Result)))
              __builtin_prefetch(results + r * n + i, 1);
          products[panel - 1][rows - 1](inputs + (begin - before) * k + step * rows, 0, ready, stride, steps, tile,
                                        chunk > 0);
          for (int64_t r = 0; last_chunk && r < rows; ++r)
            write_row(tile + r * panel * width, bias ? bias + column : nullptr, results + r * n, columns);
        }
      }
    }
  }
};

template <class Weight, class Result>
void multiply_many(const at::Tensor& x, const at::Tensor& blocks, const float* bias, at::Tensor& out) {
  const int64_t m = x.size(0), k = x.size(1), n = out.size(1);
  const Parts parts(m, kPanelRows);
  const ManyRows<Weight, Result> many{elements<Result>(x), elements<Weight>(blocks), bias, mutable_elements<Result>(out),
                                      k, n, parts};
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const Shares shares(m, threads);
  const int64_t share = (parts.count + shares.rows - 1) / shares.rows;
  const int64_t most = std::min(share, std::max<int64_t>(4, input_bytes() / (kPanelRows * k * 4)));  // parts at once
  const at::Tensor scratch = at::empty({threads, most * kPanelRows * k}, x.options().dtype(at::kFloat));
  float* inputs = scratch.mutable_data_ptr<float>();
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / shares.columns, column = task % shares.columns;
      const int64_t first = blocks.size(0) * column / shares.columns;
      const int64_t last = blocks.size(0) * (column + 1) / shares.columns;
      const int64_t top = parts.count * row / shares.rows, bottom = parts.count * (row + 1) / shares.rows;
      const Parts slices(bottom - top, most);
      for (int64_t slice = 0; slice < slices.count; ++slice)
        many.multiply(top + slices.begin(slice), top + slices.begin(slice + 1), first, last,
                      inputs + task * most * kPanelRows * k);
    }
  });
}

// x and the result have the same type.
template <class Weight, class Result>
void multiply(const at::Tensor& x, const at::Tensor& blocks, const float* bias, at::Tensor& out) {
  const Parts parts(x.size(0), geometry().most_rows);
  if (parts.count > 2) multiply_many<Weight, Result>(x, blocks, bias, out);
  else multiply_few<Weight, Result>(x, parts, blocks, bias, out);
}

// Returns whether the memory layout of the blocks is the one that the inner products read.
bool fits(const at::Tensor& blocks, int64_t out_features) {
  const auto [lanes, width, most_rows, panel] = geometry();
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
  TORCH_CHECK(blocks.dim() >= 2 && out_features >= 0 && out_features * k <= blocks.numel(),
              "blocked_linear: blocks of shape ", blocks.sizes(), " do not hold a weight of ", out_features, " rows");
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == k, "blocked_linear: input of shape ", x.sizes(),
              " does not fit a weight of ", out_features, " x ", k);
  TORCH_CHECK(is_float_type(x.scalar_type()) && is_float_type(blocks.scalar_type()), "blocked_linear: input ",
              x.scalar_type(), " and weight ", blocks.scalar_type(), "; use float32, bfloat16 or float16");
  if (k == 0) {  // the blocks are empty, and so are the sums
    auto shape = x.sizes().vec();
    shape.back() = out_features;
    const at::Tensor nothing = at::zeros(shape, x.options());
    return bias.has_value() && bias->defined() ? nothing.add(bias->to(x.scalar_type())) : nothing;
  }
  if (!fits(blocks, out_features)) {
    TORCH_WARN_ONCE("blocked_linear: the layout of the weight is not this machine's, so it is copied at "
                    "every call; convert it once with Device.arrange_linear");
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

// Returns the number of weight rows in a block; backplane_cpu_block_lanes returns the number in one vector of a block.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_block_width() {
  return static_cast<int>(backplane::cpu::geometry().width);
}
extern "C" __attribute__((visibility("default"))) int backplane_cpu_block_lanes() {
  return static_cast<int>(backplane::cpu::geometry().lanes);
}

// Returns whether blocked_linear is faster than PyTorch for weights of a type (0 float32, 1 bfloat16, 2 float16).
extern "C" __attribute__((visibility("default"))) int backplane_cpu_wants_blocks(int type) {
  using backplane::cpu::has_fast_matmul;
#if defined(__aarch64__)
  // PyTorch's float32 GEMM on ARM is as fast with one row and with hundreds, and slower in between
  // (docs/internals/kernels.md).
  if (type == 0) return 1;
#endif
  return (type == 1 && !has_fast_matmul(at::kBFloat16)) || (type == 2 && !has_fast_matmul(at::kHalf));
}
