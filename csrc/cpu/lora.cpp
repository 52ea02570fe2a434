// Applies LoRA adapters, several per batch.
//
// Tokens of one adapter are processed four at a time, wherever in the batch they are, so that its weights are read once
// for four tokens. Tokens without an adapter cost nothing.

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <vector>

#include "isa.h"
#include "rows.h"

namespace backplane::cpu {
namespace {

constexpr int kTogether = 4;  // tokens, and rows of weights: 16 sums stay in registers
constexpr int64_t kColumns = 256;  // columns of a result that one thread writes at a time

template <class X>
using TokenRows = std::array<const X*, kTogether>;

// Computes out[token][row] = sum over `width` of x[token] * weights[row], for up to four tokens and four rows.
template <class X, class A>
struct Dots {
  template <int W, int Tokens, int Count>
  static BACKPLANE_INLINE void some(const TokenRows<X>& x, const A* weights, int64_t stride, int64_t width,
                                    float* out) {
    Floats<W> sums[Tokens][Count] = {};
    int64_t i = 0;
    for (; i + W <= width; i += W) {
      Floats<W> row[Count];
      for (int c = 0; c < Count; ++c) row[c] = read<W>(weights + c * stride + i);
      for (int t = 0; t < Tokens; ++t) {
        const Floats<W> value = read<W>(x[t] + i);
        for (int c = 0; c < Count; ++c) sums[t][c] += value * row[c];
      }
    }
    if (i < width) {
      Floats<W> row[Count];
      for (int c = 0; c < Count; ++c) row[c] = read_some<W>(weights + c * stride + i, width - i);
      for (int t = 0; t < Tokens; ++t) {
        const Floats<W> value = read_some<W>(x[t] + i, width - i);
        for (int c = 0; c < Count; ++c) sums[t][c] += value * row[c];
      }
    }
    for (int t = 0; t < Tokens; ++t)
      for (int c = 0; c < Count; ++c) out[t * kTogether + c] = sum<W>(sums[t][c]);
  }

  template <int W, int Tokens>
  static BACKPLANE_INLINE void rows(const TokenRows<X>& x, const A* weights, int64_t stride, int64_t width,
                                    int64_t count, float* out) {
    if (count == kTogether) return some<W, Tokens, kTogether>(x, weights, stride, width, out);
    for (int64_t c = 0; c < count; ++c) some<W, Tokens, 1>(x, weights + c * stride, stride, width, out + c);
  }

  template <int W>
  static BACKPLANE_INLINE void run(TokenRows<X> x, int64_t tokens, const A* weights, int64_t stride, int64_t width,
                                   int64_t count, float* out) {
    switch (tokens) {
      case 1: return rows<W, 1>(x, weights, stride, width, count, out);
      case 2: return rows<W, 2>(x, weights, stride, width, count, out);
      case 3: return rows<W, 3>(x, weights, stride, width, count, out);
      default: return rows<W, 4>(x, weights, stride, width, count, out);
    }
  }
};

// Computes y = change, or y + change, rounded once.
template <class T>
struct Change {
  template <int W>
  static BACKPLANE_INLINE void run(T* y, const float* change, int64_t n, bool add) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      const Floats<W> v = read<W>(change + i);
      write<W>(y + i, add ? read<W>(y + i) + v : v);
    }
    if (i < n) {
      const Floats<W> v = read_some<W>(change + i, n - i);
      write_some<W>(y + i, add ? read_some<W>(y + i, n - i) + v : v, n - i);
    }
  }
};

// Up to four tokens that use one adapter.
struct Group {
  int64_t slot, count;
  std::array<int64_t, kTogether> tokens;
};

std::vector<Group> groups_of(const Integers& indices, int64_t tokens, int64_t slots) {
  std::vector<Group> groups;
  std::vector<int64_t> open(slots, -1);  // per slot, its group that still has room
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t slot = indices[token];
    if (slot < 0 || slot >= slots) continue;
    if (open[slot] < 0 || groups[open[slot]].count == kTogether) {
      open[slot] = static_cast<int64_t>(groups.size());
      groups.push_back({slot, 0, {}});
    }
    Group& group = groups[open[slot]];
    group.tokens[group.count++] = token;
  }
  return groups;
}

template <class X>
TokenRows<X> rows_of_group(const Group& group, const X* x, int64_t stride) {
  TokenRows<X> rows{};
  for (int64_t t = 0; t < group.count; ++t) rows[t] = x + group.tokens[t] * stride;
  return rows;
}

at::Tensor with_adjacent_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

void check(const char* name, const at::Tensor& x, const at::Tensor& weights, const at::Tensor& indices) {
  TORCH_CHECK(x.dim() == 2 && weights.dim() == 3 && indices.dim() == 1, name, ": x has shape ", x.sizes(),
              ", adapters ", weights.sizes(), ", indices ", indices.sizes(), "; they must have 2, 3 and 1 dimensions");
  TORCH_CHECK(x.size(1) == weights.size(2), name, ": x of shape ", x.sizes(), " does not fit adapters of shape ",
              weights.sizes());
  TORCH_CHECK(indices.size(0) == x.size(0), name, ": got ", indices.size(0), " indices for ", x.size(0), " tokens");
}

// Calls `call` with the rows of x, their stride, the adapters, and the dot-product kernel for both types. x is widened
// if its type differs from that of the adapters.
template <class F>
void with_types(const char* name, const at::Tensor& x, const at::Tensor& weights, F&& call) {
  with_float_type(weights.scalar_type(), name, [&](auto a_tag) {
    using A = decltype(a_tag);
    const auto with = [&](const at::Tensor& from, auto x_tag) {
      using X = decltype(x_tag);
      call(elements<X>(from), from.stride(0), elements<A>(weights), pick<Dots<X, A>>());
    };
    if (x.scalar_type() == weights.scalar_type())
      with(with_adjacent_rows(x), A{});
    else
      with(with_adjacent_rows(x.to(at::kFloat)), float{});
  });
}

at::Tensor lora_shrink(const at::Tensor& x, const at::Tensor& lora_a, const at::Tensor& indices, double scale) {
  const char* name = "lora_shrink";
  check(name, x, lora_a, indices);
  const int64_t tokens = x.size(0), width = x.size(1), rank = lora_a.size(1);
  const at::Tensor result = at::zeros({tokens, rank}, x.options().dtype(at::kFloat));
  const std::vector<Group> groups = groups_of(Integers(indices, name), tokens, lora_a.size(0));
  if (groups.empty() || rank == 0) return result;
  const at::Tensor weights = with_adjacent_rows(lora_a);
  float* out = mutable_elements<float>(result);
  with_types(name, x, weights, [&](const auto* xp, int64_t x_stride, const auto* ap, auto dots) {
    const int64_t blocks = (rank + kTogether - 1) / kTogether;
    const int64_t units = static_cast<int64_t>(groups.size()) * blocks;
    at::parallel_for(0, units, rows_per_thread(kTogether * width), [&](int64_t begin, int64_t end) {
      float products[kTogether * kTogether];
      for (int64_t unit = begin; unit < end; ++unit) {
        const Group& group = groups[unit / blocks];
        const int64_t row = unit % blocks * kTogether, count = std::min<int64_t>(kTogether, rank - row);
        const auto* block = ap + group.slot * weights.stride(0) + row * weights.stride(1);
        dots(rows_of_group(group, xp, x_stride), group.count, block, weights.stride(1), width, count, products);
        for (int64_t t = 0; t < group.count; ++t)
          for (int64_t c = 0; c < count; ++c)
            out[group.tokens[t] * rank + row + c] = products[t * kTogether + c] * static_cast<float>(scale);
      }
    });
  });
  return result;
}

void expand_into(const char* name, const at::Tensor& y, const at::Tensor& x, const at::Tensor& weights,
                 const std::vector<Group>& groups, int64_t offset, int64_t width, bool add) {
  const int64_t rank = x.size(1), strips = (width + kColumns - 1) / kColumns;
  const int64_t units = static_cast<int64_t>(groups.size()) * strips;
  with_types(name, x, weights, [&](const auto* xp, int64_t x_stride, const auto* bp, auto dots) {
    with_float_type(y.scalar_type(), name, [&](auto y_tag) {
      using T = decltype(y_tag);
      T* yp = mutable_elements<T>(y);
      const auto change = pick<Change<T>>();
      at::parallel_for(0, units, rows_per_thread(kColumns * rank), [&](int64_t begin, int64_t end) {
        float products[kTogether * kTogether], wide[kTogether][kColumns];
        for (int64_t unit = begin; unit < end; ++unit) {
          const Group& group = groups[unit / strips];
          const int64_t first = unit % strips * kColumns, last = std::min(first + kColumns, width);
          const auto rows = rows_of_group(group, xp, x_stride);
          for (int64_t column = first; column < last; column += kTogether) {
            const int64_t count = std::min<int64_t>(kTogether, last - column);
            const auto* block = bp + group.slot * weights.stride(0) + column * weights.stride(1);
            dots(rows, group.count, block, weights.stride(1), rank, count, products);
            for (int64_t t = 0; t < group.count; ++t)
              for (int64_t c = 0; c < count; ++c) wide[t][column - first + c] = products[t * kTogether + c];
          }
          for (int64_t t = 0; t < group.count; ++t)
            change(yp + group.tokens[t] * y.stride(0) + offset + first, wide[t], last - first, add);
        }
      });
    });
  });
}

void lora_expand(const at::Tensor& y, const at::Tensor& x, const at::Tensor& lora_b, const at::Tensor& indices,
                 int64_t offset, std::optional<int64_t> size, bool add) {
  const char* name = "lora_expand";
  check(name, x, lora_b, indices);
  TORCH_CHECK(y.dim() == 2 && y.size(0) == x.size(0), name, ": y of shape ", y.sizes(), " does not fit x of shape ",
              x.sizes());
  const int64_t width = size.value_or(std::min(lora_b.size(1), y.size(1) - offset));
  TORCH_CHECK(offset >= 0 && width >= 0 && offset + width <= y.size(1) && width <= lora_b.size(1), name, ": ", width,
              " columns from offset ", offset, " exceed y of shape ", y.sizes(), " or adapters of shape ",
              lora_b.sizes());
  if (!add) y.narrow(1, offset, width).zero_();  // for tokens without an adapter
  const std::vector<Group> groups = groups_of(Integers(indices, name), x.size(0), lora_b.size(0));
  if (groups.empty() || width == 0) return;
  const at::Tensor target = with_adjacent_rows(y);
  expand_into(name, target, x, with_adjacent_rows(lora_b), groups, offset, width, add);
  if (!target.is_same(y)) y.copy_(target);
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("lora_shrink", &backplane::cpu::lora_shrink);
  library.impl("lora_expand", &backplane::cpu::lora_expand);
}
