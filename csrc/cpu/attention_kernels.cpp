// Implements the attention kernels in float32: tiles of keys with a running (online) softmax.
//
// A tile of keys and values is widened once into a buffer in the L1 cache and then used by every query row of the item;
// few queries read a float32 cache in place. Queries of an item are numbered m = row * group + head of the group. Many
// queries are the lanes of vectors: scores are key-major, the softmax runs down the lanes, and no vector is reduced. Up
// to kFewQueries queries would leave most lanes idle; then keys are the lanes of the softmax, and dot products end with
// a reduction.

#include "attention_gemm.h"
#include "attention_softmax.h"
#include "fp8.h"

namespace backplane::cpu::attention {
namespace {

constexpr int64_t kFewQueries = 4;
constexpr int64_t kTileBytes = 16 << 10;
constexpr int64_t kMostKeys = 64;

// The bits of numbers that are read as floats next.
using Bits __attribute__((may_alias)) = uint32_t;

template <class T>
struct Load {
  template <int W>
  static BACKPLANE_INLINE void row(const T* from, int64_t width, float* to) {
    int64_t i = 0;
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      // GCC's vectorizer unpacks a whole vector at once; a conversion of vector types does not.
      const auto* narrow = reinterpret_cast<const uint16_t*>(from);
      auto* wide = reinterpret_cast<Bits*>(to);
      for (; i + 2 * W <= width; i += 2 * W) {
#pragma GCC ivdep
        for (int j = 0; j < 2 * W; ++j) wide[i + j] = static_cast<uint32_t>(narrow[i + j]) << 16;
      }
    }
    for (; i + W <= width; i += W) store<W>(to + i, read<W>(from + i));
    if (i < width) write_some<W>(to + i, read_some<W>(from + i, width - i), width - i);
  }

  template <int W>
  static BACKPLANE_INLINE void run(const void* base, int64_t offset, int64_t row_stride, int64_t count, int64_t width,
                                   int64_t spread, float* to, int64_t to_stride) {
    const T* from = static_cast<const T*>(base) + offset;
    for (int64_t r = 0; r < count; ++r, from += row_stride, to += to_stride) {
      if (spread == 1)
        row<W>(from, width, to);
      else
        for (int64_t i = 0; i < width; ++i) to[i] = static_cast<float>(from[i * spread]);
      for (int64_t i = width; i < to_stride; ++i) to[i] = 0.0f;
    }
  }
};

template <class T>
struct LoadBytes {
  template <int W>
  static BACKPLANE_INLINE void run(const void* base, int64_t offset, int64_t row_stride, int64_t count, int64_t width,
                                   int64_t spread, float* to, int64_t to_stride) {
    const float* numbers = fp8_numbers<T>().data();
    const uint8_t* from = static_cast<const uint8_t*>(base) + offset;
    for (int64_t r = 0; r < count; ++r, from += row_stride, to += to_stride) {
      for (int64_t i = 0; i < width; ++i) to[i] = numbers[from[i * spread]];
      for (int64_t i = width; i < to_stride; ++i) to[i] = 0.0f;
    }
  }
};

template <class T>
struct Store {
  template <int W>
  static BACKPLANE_INLINE void run(const float* from, void* base, int64_t offset, int64_t width, int64_t spread) {
    T* to = static_cast<T*>(base) + offset;
    int64_t i = 0;
    if (spread == 1) {
      for (; i + W <= width; i += W) write<W>(to + i, load<W>(from + i));
      if (i < width) write_some<W>(to + i, read_some<W>(from + i, width - i), width - i);
      return;
    }
    for (; i < width; ++i) {
      T one;
      write_some<W>(&one, all<W>(from[i]), 1);
      to[i * spread] = one;
    }
  }
};

#if defined(__clang__)
#define BACKPLANE_SHUFFLE(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define BACKPLANE_SHUFFLE(A, B, ...) __builtin_shuffle(A, B, Ints<4>{__VA_ARGS__})
#endif

// Returns the sums of four vectors as the lanes of one.
template <int W>
BACKPLANE_INLINE Floats<4> four_sums(const Floats<W>* v) {
  const Floats<4> a = folded<W>(v[0]), b = folded<W>(v[1]), c = folded<W>(v[2]), d = folded<W>(v[3]);
  const Floats<4> x = BACKPLANE_SHUFFLE(a, b, 0, 4, 1, 5) + BACKPLANE_SHUFFLE(a, b, 2, 6, 3, 7);
  const Floats<4> y = BACKPLANE_SHUFFLE(c, d, 0, 4, 1, 5) + BACKPLANE_SHUFFLE(c, d, 2, 6, 3, 7);
  return BACKPLANE_SHUFFLE(x, y, 0, 1, 4, 5) + BACKPLANE_SHUFFLE(x, y, 2, 3, 6, 7);
}

// Computes scores[m][k] = query m . key k, for M queries and `count` keys that lie `step` apart.
template <int W, int M>
BACKPLANE_INLINE void dots(const float* queries, const float* keys, int64_t step, int64_t count, int64_t width,
                           float* scores, int64_t stride) {
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    Floats<W> sums[M][4];
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < 4; ++i) sums[m][i] = Floats<W>{};
    for (int64_t d = 0; d < width; d += W) {
      Floats<W> key[4];
      for (int i = 0; i < 4; ++i) key[i] = load<W>(keys + (k + i) * step + d);
      for (int m = 0; m < M; ++m) {
        const Floats<W> query = load<W>(queries + m * width + d);
        for (int i = 0; i < 4; ++i) sums[m][i] += query * key[i];
      }
    }
    for (int m = 0; m < M; ++m) store<4>(scores + m * stride + k, four_sums<W>(sums[m]));
  }
  for (; k < count; ++k)
    for (int m = 0; m < M; ++m) {
      Floats<W> total{};
      for (int64_t d = 0; d < width; d += W) total += load<W>(queries + m * width + d) * load<W>(keys + k * step + d);
      scores[m * stride + k] = sum<W>(total);
    }
}

// Accumulates mixed[m] += sum over keys of weights[m][k] * values[k], with values `step` apart.
template <int W, int M>
BACKPLANE_INLINE void mix(const float* weights, int64_t stride, const float* values, int64_t step, int64_t count,
                          int64_t width, float* mixed) {
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W)
    gemm_block<W, M, 4, true, Along::steps>(weights, stride, values + d, step, mixed + d, width, count);
  for (; d < width; d += W)
    gemm_block<W, M, 1, true, Along::steps>(weights, stride, values + d, step, mixed + d, width, count);
}

inline bool all_finite(const float* values, int64_t step, int64_t count, int64_t width) {
  uint32_t odd = 0;
  for (int64_t k = 0; k < count; ++k) {
    const auto* bits = reinterpret_cast<const Bits*>(values + k * step);
    for (int64_t d = 0; d < width; ++d) odd |= (bits[d] & kFloatSpecial) == kFloatSpecial ? 1u : 0u;
  }
  return odd == 0;
}

// Accumulates mixed[d] over those of `count` keys from `first` on that query m attends to.
__attribute__((noinline, cold)) void mix_seen(const State& state, int64_t m, int32_t first, int64_t count,
                                              const float* weights, int64_t weight_step, const float* values,
                                              int64_t step, int64_t width, float* mixed) {
  const Seen seen = seen_by(state, m, first, static_cast<int32_t>(count));
  for (int64_t k = seen.from; k < seen.to; ++k)
    for (int64_t d = 0; d < width; ++d) mixed[d] += weights[k * weight_step] * values[k * step + d];
}

template <int W>
BACKPLANE_INLINE Ints<W> count_from(int32_t first) {
  static constexpr int32_t kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Ints<W> v;
  std::memcpy(&v, kCount, sizeof v);
  return v + first;
}

// Computes the softmax of a tile with keys as lanes: weights[m][k] from scores[m][k].
template <int W>
BACKPLANE_INLINE void weigh_by_key(const Layer& layer, const State& state, int64_t queries, int32_t first,
                                   int32_t count, float* scores, int64_t stride, float* mixed, int64_t width) {
  for (int64_t m = 0; m < queries; ++m) {
    float* row = scores + m * stride;
    const int32_t from = state.from[m] - first;
    const int32_t to = std::min<int32_t>(count, state.to[m] - first);
    Floats<W> top = all<W>(kNone);
    for (int32_t k = 0; k < count; k += W) {
      Floats<W> s = scored<W>(layer, load<W>(row + k));
      const Ints<W> at = count_from<W>(k);
      if (layer.slopes) s += state.slope[m] * (__builtin_convertvector(at + first, Floats<W>) - state.position[m]);
      if (k < from || k + W > to) {
        s = at >= from ? s : all<W>(kNone);
        s = at < to ? s : all<W>(kNone);
      }
      top = larger<W>(s, top);
      store<W>(row + k, s);
    }
    const float before = state.peak[m], peak = std::max(before, largest<W>(top));
    state.peak[m] = peak;
    const float base = peak == kNone ? 0.0f : peak;
    const float factor = before == peak ? 1.0f : std::exp(before - base);
    Floats<W> total{};
    for (int32_t k = 0; k < count; k += W) {
      const Floats<W> w = exponential<W>(load<W>(row + k) - base);
      store<W>(row + k, w);
      total += w;
    }
    state.total[m] = state.total[m] * factor + sum<W>(total);
    if (factor != 1.0f)
      for (int64_t d = 0; d < width; d += W) store<W>(mixed + m * width + d, load<W>(mixed + m * width + d) * factor);
  }
}

// The same with queries [begin, end) as lanes: weights[k][m] from scores[k][m].
template <int W>
BACKPLANE_INLINE void weigh_by_query(const Layer& layer, const State& state, int64_t begin, int64_t end, int32_t first,
                                     int32_t count, float* scores, int64_t stride) {
  for (int64_t m = begin; m < end; m += W) {
    Weighing<W> weighing = begin_weighing<W>(layer, state, m, first, count, scores + m, stride);
    int32_t k = 0;
    for (; k + 2 <= count; k += 2) {  // a weight is a chain of dependent operations; two chains overlap
      const Floats<W> w[2] = {weighing.weight(load<W>(scores + k * stride + m)),
                              weighing.weight(load<W>(scores + (k + 1) * stride + m))};
      store<W>(scores + k * stride + m, w[0]);
      store<W>(scores + (k + 1) * stride + m, w[1]);
      weighing.total += w[0] + w[1];
    }
    for (; k < count; ++k) {
      const Floats<W> w = weighing.weight(load<W>(scores + k * stride + m));
      store<W>(scores + k * stride + m, w);
      weighing.total += w;
    }
    weighing.end(state, m);
  }
}

// Calls visit(key, value, done, rows) for each contiguous run of keys [begin, begin + count): the offsets of key and
// value of the item's head, the number of keys in earlier runs, and the number in this one. A run ends with its KV
// block.
template <class F>
BACKPLANE_INLINE void over_stretches(const Layer& layer, const Item& item, int64_t begin, int64_t count,
                                     const F& visit) {
  const Context& context = *item.context;
  const int64_t key_head = item.key_head * layer.key.head_stride, value_head = item.key_head * layer.value.head_stride;
  if (context.blocks == nullptr) {
    const int64_t row = context.first + begin;
    visit(row * context.key_step + key_head, row * context.value_step + value_head, int64_t(0), count);
    return;
  }
  for (int64_t done = 0; done < count;) {
    const int64_t block = context.blocks[(begin + done) / context.block_size];
    const int64_t offset = (begin + done) % context.block_size;
    const int64_t rows = std::min(count - done, context.block_size - offset);
    visit(block * context.key_block + offset * context.key_step + key_head,
          block * context.value_block + offset * context.value_step + value_head, done, rows);
    done += rows;
  }
}

// Converts keys and values of a tile to float32.
inline void load_tile(const Layer& layer, const Item& item, int64_t begin, int64_t count, float* keys,
                      int64_t key_width, float* values, int64_t value_width) {
  const Context& context = *item.context;
  over_stretches(layer, item, begin, count, [&](int64_t key, int64_t value, int64_t done, int64_t rows) {
    layer.key.load(layer.key.data, key, context.key_step, rows, layer.key.width, layer.key.spread,
                   keys + done * key_width, key_width);
    layer.value.load(layer.value.data, value, context.value_step, rows, layer.value.width, layer.value.spread,
                     values + done * value_width, value_width);
  });
}

inline void prefetch(const Heads& heads, int64_t offset, int64_t step, int64_t rows) {
  if (heads.spread != 1) return;
  const char* from = static_cast<const char*>(heads.data) + offset * heads.bytes;
  for (int64_t r = 0; r < rows; ++r, from += step * heads.bytes)
    for (int64_t byte = 0; byte < heads.width * heads.bytes; byte += 64) __builtin_prefetch(from + byte);
}

// Prefetches the keys, or the values, of a tile. The hardware prefetcher stops at the end of a page, and KV blocks can
// lie anywhere.
inline void prefetch_tile(const Layer& layer, const Item& item, int64_t begin, int64_t count, bool keys) {
  over_stretches(layer, item, begin, count, [&](int64_t key, int64_t value, int64_t, int64_t rows) {
    if (keys) prefetch(layer.key, key, item.context->key_step, rows);
    else prefetch(layer.value, value, item.context->value_step, rows);
  });
}

// Returns whether rows are float32 vectors as they lie in the cache, so that few queries need no copy of them.
template <int W>
BACKPLANE_INLINE bool in_place(const Heads& heads) {
  return heads.bytes == sizeof(float) && heads.spread == 1 && heads.width % W == 0;
}

// The arguments of AttendFew: one tile, for few queries.
struct FewTile {
  const Layer& layer;
  const Item& item;
  const State& state;
  const float* queries;
  int64_t begin, count, next;  // of the tile, and the number of keys in the next one
  float *keys, *values;        // buffers for the tile
  int64_t width, value_width;
  float *scores, *mixed;
};

// One function per number of queries: inlined into AttendItem, the compiler would run out of registers.
template <int M>
struct AttendFew {
  // Accumulates the values of `rows` keys of the tile, after the first `done` keys.
  template <int W>
  static BACKPLANE_INLINE void mix_values(const FewTile& t, bool seen_by_all, const float* values, int64_t step,
                                          int64_t done, int64_t rows) {
    if (seen_by_all || all_finite(values, step, rows, t.value_width)) {
      mix<W, M>(t.scores + done, kMostKeys, values, step, rows, t.value_width, t.mixed);
      return;
    }
    const auto first = static_cast<int32_t>(t.begin - t.item.first_key + done);
    for (int64_t m = 0; m < M; ++m)
      mix_seen(t.state, m, first, rows, t.scores + m * kMostKeys + done, 1, values, step, t.value_width,
               t.mixed + m * t.value_width);
  }

  template <int W>
  static BACKPLANE_INLINE void run(const FewTile& t) {
    const Layer& layer = t.layer;
    const Item& item = t.item;
    const auto first = static_cast<int32_t>(t.begin - item.first_key), seen = static_cast<int32_t>(t.count);
    const bool seen_by_all = is_seen_by_all(t.state, 0, M, first, seen);
    if (!in_place<W>(layer.key) || !in_place<W>(layer.value)) {
      load_tile(layer, item, t.begin, t.count, t.keys, t.width, t.values, t.value_width);
      prefetch_tile(layer, item, t.begin + t.count, t.next, true);
      dots<W, M>(t.queries, t.keys, t.width, t.count, t.width, t.scores, kMostKeys);
      weigh_by_key<W>(layer, t.state, M, first, seen, t.scores, kMostKeys, t.mixed, t.value_width);
      prefetch_tile(layer, item, t.begin + t.count, t.next, false);
      mix_values<W>(t, seen_by_all, t.values, t.value_width, 0, t.count);
      return;
    }
    const auto* all_keys = static_cast<const float*>(layer.key.data);
    const auto* all_values = static_cast<const float*>(layer.value.data);
    prefetch_tile(layer, item, t.begin, t.count, false);
    over_stretches(layer, item, t.begin, t.count,
                   [&](int64_t key, int64_t, int64_t done, int64_t rows) __attribute__((always_inline)) {
                     dots<W, M>(t.queries, all_keys + key, item.context->key_step, rows, t.width, t.scores + done,
                                kMostKeys);
                   });
    weigh_by_key<W>(layer, t.state, M, first, seen, t.scores, kMostKeys, t.mixed, t.value_width);
    prefetch_tile(layer, item, t.begin + t.count, t.next, true);
    over_stretches(layer, item, t.begin, t.count,
                   [&](int64_t, int64_t value, int64_t done, int64_t rows) __attribute__((always_inline)) {
                     mix_values<W>(t, seen_by_all, all_values + value, item.context->value_step, done, rows);
                   });
  }
};

using Few = void (*)(const FewTile&);

inline Few attend_few(int64_t queries) {
  const Few by_queries[] = {pick<AttendFew<1>>(), pick<AttendFew<2>>(), pick<AttendFew<3>>(), pick<AttendFew<4>>()};
  static_assert(sizeof by_queries / sizeof by_queries[0] == kFewQueries);
  return by_queries[queries - 1];
}

struct AttendItem {
  template <int W>
  static BACKPLANE_INLINE void run(const Layer& layer, const Item& item, Scratch& scratch) {
    const int64_t group = layer.group, queries = item.rows * group;
    const bool is_few = queries <= kFewQueries;
    constexpr int64_t kLanes = W > 8 ? W : 8;
    const int64_t lanes = is_few ? queries : padded(queries, kLanes);
    const int64_t width = padded(layer.key.width, W), value_width = padded(layer.value.width, W);
    const int64_t widest = std::max(width, value_width);
    const int64_t tile = std::max<int64_t>(16, std::min(kMostKeys, kTileBytes / (4 * widest) / 8 * 8));

    const int64_t need = lanes * (width + value_width + kMostKeys) + tile * (width + value_width) + queries * width +
                         7 * padded(lanes, 16) + 16;
    if (static_cast<int64_t>(scratch.size()) < need) scratch.resize(need);
    // A vector that crosses a cache line costs two loads.
    float* next = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
    const auto take = [&next](int64_t floats) __attribute__((always_inline)) {
      float* taken = next;
      next += floats;
      return taken;
    };
    float* by_dimension = take(is_few ? 0 : lanes * width);
    float* mixed = take(lanes * value_width);
    float* scores = take(lanes * kMostKeys);
    float* keys = take(tile * width);
    float* values = take(tile * value_width);
    float* by_query = take(queries * width);
    State state;
    state.peak = take(padded(lanes, 16));
    state.total = take(padded(lanes, 16));
    state.factor = take(padded(lanes, 16));
    state.from = reinterpret_cast<int32_t*>(take(padded(lanes, 16)));
    state.to = reinterpret_cast<int32_t*>(take(padded(lanes, 16)));
    state.slope = take(padded(lanes, 16));
    state.position = take(padded(lanes, 16));

    begin_state(layer, item, lanes, state);
    for (int64_t m = 0; m < queries; ++m) {
      const int64_t head = item.key_head * group + m % group;
      const int64_t offset = (item.row + m / group) * layer.query_row_stride + head * layer.query.head_stride;
      layer.query.load(layer.query.data, offset, 0, 1, layer.query.width, layer.query.spread, by_query + m * width,
                       width);
    }
    prefetch_tile(layer, item, item.first_key, std::min(tile, item.end_key - item.first_key), true);
    for (int64_t i = 0; i < lanes * value_width; ++i) mixed[i] = 0.0f;
    if (!is_few)
      for (int64_t d = 0; d < width; ++d)
        for (int64_t m = 0; m < lanes; ++m) by_dimension[d * lanes + m] = m < queries ? by_query[m * width + d] : 0.0f;

    const Few few = is_few ? attend_few(queries) : nullptr;
    for (int64_t begin = item.first_key; begin < item.end_key; begin += tile) {
      const int64_t count = std::min(tile, item.end_key - begin);
      if (is_few) {
        const int64_t next = std::min(tile, item.end_key - begin - count);
        few({layer, item, state, by_query, begin, count, next, keys, values, width, value_width, scores, mixed});
        continue;
      }
      const auto first = static_cast<int32_t>(begin - item.first_key), seen = static_cast<int32_t>(count);
      load_tile(layer, item, begin, count, keys, width, values, value_width);
      // Queries that attend to any key of this tile are adjacent.
      int64_t low = 0, high = queries;
      while (low < queries && state.to[low] <= first) ++low;
      while (high > low && state.from[high - 1] >= first + seen) --high;
      if (low == high) continue;
      low = low / kLanes * kLanes;
      const int64_t high_lanes = padded(high, kLanes);
      gemm<W, false, Along::steps>(keys, width, count, by_dimension + low, lanes, high_lanes - low, scores + low,
                                   lanes, width);
      weigh_by_query<W>(layer, state, low, high_lanes, first, seen, scores, lanes);
      for (int64_t m = low; m < high; ++m) {
        if (state.factor[m] == 1.0f) continue;
        for (int64_t d = 0; d < value_width; d += W)
          store<W>(mixed + m * value_width + d, load<W>(mixed + m * value_width + d) * state.factor[m]);
      }
      if (is_seen_by_all(state, low, high_lanes, first, seen) || all_finite(values, value_width, count, value_width))
        gemm<W, true, Along::rows>(scores + low, lanes, high - low, values, value_width, value_width,
                                   mixed + low * value_width, value_width, count);
      else
        for (int64_t m = low; m < high; ++m)
          mix_seen(state, m, first, count, scores + m, lanes, values, value_width, value_width,
                   mixed + m * value_width);
    }

    for (int64_t m = 0; m < queries; ++m)
      deliver<W>(layer, item, m, state.peak[m], state.total[m], mixed + m * value_width, value_width);
  }
};

struct MergeItem {
  template <int W>
  static BACKPLANE_INLINE void run(const Layer& layer, const Item& item, const float* partials, int64_t pieces,
                                   int64_t piece_stride, Scratch& scratch) {
    const int64_t group = layer.group, stride = partial_stride(layer), width = padded(layer.value.width, W);
    if (static_cast<int64_t>(scratch.size()) < width) scratch.resize(width);
    float* mixed = scratch.data();
    for (int64_t m = 0; m < item.rows * group; ++m) {
      float peak = kNone, total = 0.0f;
      for (int64_t p = 0; p < pieces; ++p) peak = std::max(peak, partials[p * piece_stride + m * stride]);
      for (int64_t d = 0; d < width; ++d) mixed[d] = 0.0f;
      for (int64_t p = 0; p < pieces; ++p) {
        const float* partial = partials + p * piece_stride + m * stride;
        const float factor = partial[0] == peak ? 1.0f : std::exp(partial[0] - peak);
        total += factor * partial[1];
        for (int64_t d = 0; d < layer.value.width; ++d) mixed[d] += factor * partial[2 + d];
      }
      const int64_t head = item.key_head * group + m % group;
      finish<W>(layer, head, peak, total, mixed, width);
      const int64_t offset = (item.row + m / group) * layer.out_row_stride + head * layer.out_head_stride;
      layer.store(mixed, layer.out, offset, layer.value.width, layer.out_spread);
    }
  }
};

}  // namespace

LoadRows row_loader(at::ScalarType type) {
  if (type == at::ScalarType::Float8_e4m3fn) return pick<LoadBytes<c10::Float8_e4m3fn>>();
  if (type == at::ScalarType::Float8_e5m2) return pick<LoadBytes<c10::Float8_e5m2>>();
  if (type == at::ScalarType::BFloat16) return pick<Load<c10::BFloat16>>();
  if (type == at::ScalarType::Half) return pick<Load<c10::Half>>();
  return pick<Load<float>>();
}

StoreRow row_storer(at::ScalarType type) {
  if (type == at::ScalarType::BFloat16) return pick<Store<c10::BFloat16>>();
  if (type == at::ScalarType::Half) return pick<Store<c10::Half>>();
  return pick<Store<float>>();
}

bool is_storage_type(at::ScalarType type) {
  return type == at::ScalarType::Float || type == at::ScalarType::BFloat16 || type == at::ScalarType::Half ||
         type == at::ScalarType::Float8_e4m3fn || type == at::ScalarType::Float8_e5m2;
}

Attend attend() { return pick<AttendItem>(); }
Merge merge() { return pick<MergeItem>(); }

}  // namespace backplane::cpu::attention
