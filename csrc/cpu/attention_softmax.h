// Implements what all attention kernels share: the mask, the softmax of a tile of scores, and the final division.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "isa.h"
#include "vector_math.h"

namespace backplane::cpu::attention {

constexpr float kNone = -std::numeric_limits<float>::infinity();

constexpr int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Returns the larger of two numbers, or `b` if `a` is NaN.
template <int W>
BACKPLANE_INLINE Floats<W> larger_number(Floats<W> a, Floats<W> b) {
#if defined(__aarch64__)
  if constexpr (W == 4)  // one instruction instead of two
    return bits_as<Floats<W>>(vmaxnmq_f32(bits_as<float32x4_t>(a), bits_as<float32x4_t>(b)));
#endif
  return larger<W>(a, b);
}

// Turns a dot product into the score that the softmax takes: scale and soft cap.
template <int W>
BACKPLANE_INLINE Floats<W> scored(const Layer& layer, Floats<W> s) {
  s = s * layer.scale;
  if (layer.soft_cap > 0) s = layer.soft_cap * hyperbolic_tangent<W>(s / layer.soft_cap);
  return s;
}

struct State {
  float *peak, *total, *factor;  // per query: running maximum, running sum, and the factor that rescales earlier sums
  int32_t *from, *to;            // range of visible keys, relative to the item's first
  float *slope, *position;       // for ALiBi
};

// Initializes the state before the first tile.
inline void begin_state(const Layer& layer, const Item& item, int64_t lanes, const State& state) {
  const int64_t group = layer.group, queries = item.rows * group;
  for (int64_t m = 0; m < lanes; ++m) {
    // Padding lanes copy the last query's range, which keeps the ranges in order.
    const int64_t row = std::min(m, queries - 1) / group, head = item.key_head * group + m % group;
    const int64_t position = item.position + row;
    state.peak[m] = kNone;
    state.total[m] = 0.0f;
    state.from[m] = static_cast<int32_t>(std::max(first_seen(layer, position), item.first_key) - item.first_key);
    const int64_t end = std::min(seen_end(layer, position, item.length), item.end_key);
    state.to[m] = static_cast<int32_t>(end - item.first_key);
    state.slope[m] = layer.slopes ? layer.slopes[head] : 0.0f;
    state.position[m] = static_cast<float>(position - item.first_key);
  }
}

// Returns whether queries [begin, end) all attend to all `count` keys from `first` on. Later rows attend to later keys,
// so checking the outermost rows is enough.
inline bool is_seen_by_all(const State& state, int64_t begin, int64_t end, int32_t first, int32_t count) {
  return state.from[end - 1] <= first && state.to[begin] >= first + count;
}

// The keys of a tile that query m attends to. A weight of zero does not remove the NaN and infinities of masked values
// (0 * NaN is NaN), so a tile that holds any is accumulated query by query.
struct Seen {
  int32_t from, to;
};
inline Seen seen_by(const State& state, int64_t m, int32_t first, int32_t count) {
  return {std::max<int32_t>(0, state.from[m] - first), std::min<int32_t>(count, state.to[m] - first)};
}

// The softmax of a tile for W queries, one per lane, once the maxima are known: weight() turns a score into a weight,
// which the caller adds to `total`.
template <int W>
struct Weighing {
  Floats<W> peak, factor, total;
  float slope;     // factor that turns scores into exponents of two
  Floats<W> base;  // the maxima, multiplied by the same factor

  BACKPLANE_INLINE Floats<W> weight(Floats<W> score) const { return power_of_two<W>(score * slope - base); }

  BACKPLANE_INLINE void end(const State& state, int64_t m) const {
    store<W>(state.peak + m, peak);
    store<W>(state.total + m, total);
    store<W>(state.factor + m, factor);
  }
};

// Finds the maxima of queries [m, m + W) over the tile's scores[k * stride]. If a score is only a scaled dot product,
// the dot products stay as they are and the scale is applied in weight(); otherwise scores replace them.
template <int W>
BACKPLANE_INLINE Weighing<W> begin_weighing(const Layer& layer, const State& state, int64_t m, int32_t first,
                                            int32_t count, float* scores, int64_t stride) {
  constexpr float kLog2OfE = 1.44269504f;
  // Later rows attend to later keys, so checking the outermost lanes is enough.
  const bool whole = state.from[m + W - 1] <= first && state.to[m] >= first + count;
  const bool plain = layer.soft_cap <= 0 && layer.slopes == nullptr && layer.scale > 0;
  Floats<W> top = all<W>(kNone);
  float scale = 1.0f;
  if (plain && whole) {
    for (int32_t k = 0; k < count; ++k) top = larger_number<W>(load<W>(scores + k * stride), top);
    scale = layer.scale;
    top = top * scale;
  } else {
    Ints<W> from, to;
    std::memcpy(&from, state.from + m, sizeof from);
    std::memcpy(&to, state.to + m, sizeof to);
    const Floats<W> slope = load<W>(state.slope + m), position = load<W>(state.position + m);
    for (int32_t k = 0; k < count; ++k) {
      Floats<W> s = scored<W>(layer, load<W>(scores + k * stride));
      if (layer.slopes) s += slope * (static_cast<float>(first + k) - position);
      s = from <= first + k ? s : all<W>(kNone);
      s = to > first + k ? s : all<W>(kNone);
      top = larger<W>(s, top);
      store<W>(scores + k * stride, s);
    }
  }
  Weighing<W> weighing;
  const Floats<W> before = load<W>(state.peak + m);
  weighing.peak = larger<W>(before, top);
  const Floats<W> base = weighing.peak == kNone ? Floats<W>{} : weighing.peak;
  weighing.factor = before == weighing.peak ? all<W>(1.0f) : exponential<W>(before - base);
  weighing.total = load<W>(state.total + m) * weighing.factor;
  weighing.slope = scale * kLog2OfE;
  weighing.base = base * kLog2OfE;
  return weighing;
}

// Computes the result of one query: the weighted sum of values divided by the sum of weights, to which an attention
// sink adds a term. A query without visible keys has the sum 0 and the result 0; one whose scores are all NaN has no
// maximum, but its sum is NaN.
template <int W>
BACKPLANE_INLINE void finish(const Layer& layer, int64_t head, float peak, float total, float* mixed, int64_t width) {
  const bool none = total == 0.0f;
  float scale = 0.0f;
  if (!none) {
    float share = 1.0f;
    if (layer.sinks) {
      const float sink = layer.sinks[head], top = std::max(peak, sink);
      share = std::exp(peak - top);
      total = total * share + std::exp(sink - top);
    }
    scale = share * layer.value_scale / total;
  }
  for (int64_t d = 0; d < width; d += W) {
    const Floats<W> v = load<W>(mixed + d) * scale;
    store<W>(mixed + d, none ? Floats<W>{} : v);
  }
}

// Writes the result of query m of an item to `out`, or, for a piece of the context, to the partial results.
template <int W>
BACKPLANE_INLINE void deliver(const Layer& layer, const Item& item, int64_t m, float peak, float total, float* mixed,
                              int64_t width) {
  if (item.partial) {
    float* partial = item.partial + m * partial_stride(layer);
    partial[0] = peak;
    partial[1] = total;
    std::memcpy(partial + 2, mixed, layer.value.width * sizeof(float));
    return;
  }
  const int64_t head = item.key_head * layer.group + m % layer.group;
  finish<W>(layer, head, peak, total, mixed, width);
  const int64_t offset = (item.row + m / layer.group) * layer.out_row_stride + head * layer.out_head_stride;
  layer.store(mixed, layer.out, offset, layer.value.width, layer.out_spread);
}

}  // namespace backplane::cpu::attention
