// What every way of attention does alike: which keys a query sees, how scores become weights, how a result is finished.
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

// Raw products into scores as the softmax sees them.
template <int W>
BACKPLANE_INLINE Floats<W> scored(const Layer& layer, Floats<W> s) {
  s = s * layer.scale;
  if (layer.soft_cap > 0) s = layer.soft_cap * hyperbolic_tangent<W>(s / layer.soft_cap);
  return s;
}

struct State {
  float *peak, *total, *factor;  // per query: running maximum, running sum, and what this tile scales the past by
  int32_t *from, *to;            // keys seen, relative to the item's first
  float *slope, *position;       // of ALiBi
};

// Before the first tile.
inline void begin_state(const Layer& layer, const Item& item, int64_t lanes, const State& state) {
  const int64_t group = layer.group, queries = item.rows * group;
  for (int64_t m = 0; m < lanes; ++m) {
    // Lanes past the end copy the last query's range, which keeps the ranges in order.
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

// The result of one query: the mixed values over the sum, the sink being one more term of the sum. A query that saw
// nothing has no sum; one whose scores are all NaN has no peak either, but its sum is NaN.
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

// Query m of an item: its result goes to `out`, or as a piece to where pieces are merged.
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
