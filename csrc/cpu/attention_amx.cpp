// Computes attention of many bfloat16 queries with AMX (amx_tiles.h): matrix products in tiles, softmax in float32
// between them.
//
// Queries are the columns of both matrix products, so that the softmax runs down the lanes of vectors, as it does
// without AMX (attention_kernels.cpp):
//   scores[key][query] = keys[key][dimension] * queries[pair of dimensions][query]
//   mixed[dimension][query] += values[dimension][key] * weights[pair of keys][query]
// Queries are interleaved into pairs and values are transposed once, for all products that use them. The weights of the
// softmax, between 0 and 1, are rounded to bfloat16 for the second product; their sum is taken before rounding.

#include "amx_tiles.h"
#include "attention_softmax.h"

namespace backplane::cpu {

bool has_bfloat16_tiles();  // features.cpp

namespace attention {
#if defined(__x86_64__)
namespace {

constexpr int W = 16;
constexpr int64_t kSide = kTileSide;
constexpr int64_t kKeys = 64;  // per tile

BACKPLANE_INLINE Words<W> numbers_of(const uint16_t* from, int64_t count) {
  Shorts<W> numbers{};
  if (count >= W)
    std::memcpy(&numbers, from, sizeof numbers);
  else if (count > 0)
    std::memcpy(&numbers, from, count * 2);
  return __builtin_convertvector(numbers, Words<W>);
}

struct Buffers {
  int64_t lanes, width, value_width;
  uint32_t* queries;  // [width / 2][lanes]
  uint16_t* keys;     // [kKeys][width]
  uint32_t* values;   // [value_width][kKeys / 2]
  float* scores;      // [kKeys][lanes]
  uint32_t* weights;  // [kKeys / 2][lanes]
  float* mixed;       // [value_width][lanes]
  float* rows;        // [W][value_width]
  State state;
};

BACKPLANE_TILES void pair_queries(const Layer& layer, const Item& item, const Buffers& b) {
  const auto* from = static_cast<const uint16_t*>(layer.query.data);
  const int64_t group = layer.group, queries = item.rows * group;
  for (int64_t m = 0; m < b.lanes; m += W)
    for (int64_t d = 0; d < b.width; d += 2 * W) {
      Floats<W> words[W];
      for (int64_t i = 0; i < W; ++i) {
        words[i] = Floats<W>{};
        if (m + i >= queries) continue;
        const int64_t row = item.row + (m + i) / group, head = item.key_head * group + (m + i) % group;
        words[i] = words_of(from + row * layer.query_row_stride + head * layer.query.head_stride + d,
                            layer.query.width - d);
      }
      transpose<W>(words);
      for (int64_t i = 0; i < W; ++i) std::memcpy(b.queries + (d / 2 + i) * b.lanes + m, &words[i], sizeof words[i]);
    }
}

// Loads keys [begin, begin + count) as rows, and the values transposed; pads both with zeros to a multiple of kSide.
BACKPLANE_TILES void load_keys(const Layer& layer, const Item& item, int64_t begin, int64_t count, const Buffers& b) {
  const Context& context = *item.context;
  const auto* keys = static_cast<const uint16_t*>(layer.key.data) + item.key_head * layer.key.head_stride;
  const auto* values = static_cast<const uint16_t*>(layer.value.data) + item.key_head * layer.value.head_stride;
  const uint16_t* value_rows[kKeys] = {};
  for (int64_t i = 0; i < padded(count, kSide); ++i) {
    uint16_t* to = b.keys + i * b.width;
    if (i >= count) {
      std::memset(to, 0, b.width * 2);
      continue;
    }
    const int64_t at = begin + i;
    int64_t key_at = (context.first + at) * context.key_step, value_at = (context.first + at) * context.value_step;
    if (context.blocks != nullptr) {
      const int64_t block = context.blocks[at / context.block_size], offset = at % context.block_size;
      key_at = block * context.key_block + offset * context.key_step;
      value_at = block * context.value_block + offset * context.value_step;
    }
    for (int64_t d = 0; d < b.width; d += 2 * W) {
      const Floats<W> words = words_of(keys + key_at + d, layer.key.width - d);
      std::memcpy(to + d, &words, sizeof words);
    }
    value_rows[i] = values + value_at;
  }
  for (int64_t first = 0; first < padded(count, kSide); first += kSide)
    for (int64_t d = 0; d < b.value_width; d += W) {
      Floats<W> words[W];
      const int64_t there = layer.value.width - d;
      for (int64_t i = 0; i < W; ++i) {
        const uint16_t *low = value_rows[first + 2 * i], *high = value_rows[first + 2 * i + 1];
        Words<W> both{};
        if (low != nullptr) both = numbers_of(low + d, there);
        if (high != nullptr) both |= numbers_of(high + d, there) << 16;
        words[i] = bits_as<Floats<W>>(both);
      }
      transpose<W>(words);
      for (int64_t i = 0; i < W; ++i)
        std::memcpy(b.values + (d + i) * (kKeys / 2) + first / 2, &words[i], sizeof words[i]);
    }
}

// Rounds two vectors of non-negative numbers to bfloat16 and interleaves them as pairs in 32-bit words.
BACKPLANE_INLINE Words<W> paired(Floats<W> low, Floats<W> high) {
  const Words<W> a = bits_as<Words<W>>(low) + 0x8000, b = bits_as<Words<W>>(high) + 0x8000;
  return (a >> 16) | (b & 0xffff0000u);
}

// Computes the softmax of a tile for queries [begin, end): turns scores into weights, and rescales the earlier sums.
BACKPLANE_TILES void weigh(const Layer& layer, const Buffers& b, int64_t begin, int64_t end, int32_t first,
                           int32_t count) {
  for (int64_t m = begin; m < end; m += W) {
    float* scores = b.scores + m;
    Weighing<W> weighing = begin_weighing<W>(layer, b.state, m, first, count, scores, b.lanes);
    for (int32_t k = 0; k < padded(count, kSide); k += 2) {
      Floats<W> low{}, high{};
      if (k < count) low = weighing.weight(load<W>(scores + k * b.lanes));
      if (k + 1 < count) high = weighing.weight(load<W>(scores + (k + 1) * b.lanes));
      weighing.total += low + high;
      const Words<W> words = paired(low, high);
      std::memcpy(b.weights + k / 2 * b.lanes + m, &words, sizeof words);
    }
    weighing.end(b.state, m);
    const Floats<W> factor = weighing.factor;
    const Floats<W> change = factor - 1.0f;
    if (largest<W>(change * change) == 0.0f) continue;
    for (int64_t d = 0; d < b.value_width; ++d) {
      float* mixed = b.mixed + d * b.lanes + m;
      store<W>(mixed, load<W>(mixed) * factor);
    }
  }
}

// Returns one number of a bfloat16 pair: the first for an even index, the second for an odd one.
float number_of(uint32_t pair, int64_t place) { return bits_as<float>(place % 2 ? pair & 0xffff0000u : pair << 16); }

bool all_finite(const Buffers& b, int64_t keys) {
  uint32_t odd = 0;
  for (int64_t d = 0; d < b.value_width; ++d)
    for (int64_t i = 0; i < keys / 2; ++i) {
      const uint32_t pair = b.values[d * (kKeys / 2) + i];
      odd |= (pair & 0x7f80u) == 0x7f80u || (pair & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
    }
  return odd == 0;
}

// Computes the second product for queries [begin, end) without tiles, over visible keys only.
void mix_seen(const Buffers& b, int64_t begin, int64_t end, int32_t first, int32_t count) {
  for (int64_t m = begin; m < end; ++m) {
    const Seen seen = seen_by(b.state, m, first, count);
    for (int64_t d = 0; d < b.value_width; ++d) {
      float& sum = b.mixed[d * b.lanes + m];
      for (int64_t k = seen.from; k < seen.to; ++k)
        sum += number_of(b.weights[k / 2 * b.lanes + m], k) * number_of(b.values[d * (kKeys / 2) + k / 2], k);
    }
  }
}

Buffers divide(const Layer& layer, const Item& item, Scratch& scratch) {
  Buffers b{};
  b.lanes = padded(item.rows * layer.group, kSide);
  b.width = padded(layer.key.width, 2 * W);
  b.value_width = padded(layer.value.width, kSide);
  const int64_t need = b.lanes * (b.width / 2 + b.value_width + kKeys + kKeys / 2 + 7) +
                       kKeys / 2 * (b.width + b.value_width) + W * b.value_width + 16;
  if (static_cast<int64_t>(scratch.size()) < need) scratch.resize(need);
  // All sizes are multiples of a cache line, so every buffer begins at one.
  float* next = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  const auto take = [&next](auto*& place, int64_t words) {
    place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(next);
    next += words;
  };
  take(b.queries, b.width / 2 * b.lanes);
  take(b.keys, kKeys * b.width / 2);
  take(b.values, b.value_width * kKeys / 2);
  take(b.scores, kKeys * b.lanes);
  take(b.weights, kKeys / 2 * b.lanes);
  take(b.mixed, b.value_width * b.lanes);
  take(b.rows, W * b.value_width);
  for (float** place : {&b.state.peak, &b.state.total, &b.state.factor, &b.state.slope, &b.state.position})
    take(*place, b.lanes);
  for (int32_t** place : {&b.state.from, &b.state.to}) take(*place, b.lanes);
  return b;
}

BACKPLANE_TILES void attend_item(const Layer& layer, const Item& item, Scratch& scratch) {
  const Buffers b = divide(layer, item, scratch);
  const int64_t queries = item.rows * layer.group, row = b.lanes * 4;
  begin_state(layer, item, b.lanes, b.state);
  std::memset(b.mixed, 0, b.value_width * b.lanes * sizeof(float));
  pair_queries(layer, item, b);
  enter_tiles();
  for (int64_t begin = item.first_key; begin < item.end_key; begin += kKeys) {
    const int64_t count = std::min(kKeys, item.end_key - begin), keys = padded(count, kSide);
    const auto first = static_cast<int32_t>(begin - item.first_key), seen = static_cast<int32_t>(count);
    // Queries that attend to any key of this tile are adjacent.
    int64_t low = 0, high = queries;
    while (low < queries && b.state.to[low] <= first) ++low;
    while (high > low && b.state.from[high - 1] >= first + seen) --high;
    if (low == high) continue;
    low = low / kSide * kSide;
    high = padded(high, kSide);
    load_keys(layer, item, begin, count, b);
    for (int64_t k = 0; k < keys; k += kSide)
      for (int64_t m = low; m < high; m += kSide)
        multiply_tiles<false>(b.keys + k * b.width, b.width * 2, b.queries + m, row, b.width / kTileDepth,
                              b.scores + k * b.lanes + m, row);
    weigh(layer, b, low, high, first, seen);
    if (!is_seen_by_all(b.state, low, high, first, seen) && !all_finite(b, keys)) {
      mix_seen(b, low, high, first, seen);
      continue;
    }
    for (int64_t d = 0; d < b.value_width; d += kSide)
      for (int64_t m = low; m < high; m += kSide)
        multiply_tiles<true>(reinterpret_cast<const uint16_t*>(b.values + d * (kKeys / 2)), kKeys * 2, b.weights + m,
                             row, keys / kTileDepth, b.mixed + d * b.lanes + m, row);
  }
  leave_tiles();
  for (int64_t m = 0; m < queries; m += W) {
    for (int64_t d = 0; d < b.value_width; d += W) {
      Floats<W> square[W];
      for (int64_t i = 0; i < W; ++i) square[i] = load<W>(b.mixed + (d + i) * b.lanes + m);
      transpose<W>(square);
      for (int64_t i = 0; i < W; ++i) store<W>(b.rows + i * b.value_width + d, square[i]);
    }
    for (int64_t i = 0; i < std::min<int64_t>(W, queries - m); ++i)
      deliver<W>(layer, item, m + i, b.state.peak[m + i], b.state.total[m + i], b.rows + i * b.value_width,
                 b.value_width);
  }
}

}  // namespace
#endif

Attend attend_by_tiles([[maybe_unused]] const Layer& layer) {
#if defined(__x86_64__)
  const LoadRows bfloat = row_loader(at::ScalarType::BFloat16);
  const auto fits = [bfloat](const Heads& heads) { return heads.load == bfloat && heads.spread == 1; };
  if (isa() == Isa::avx512 && has_bfloat16_tiles() && fits(layer.query) && fits(layer.key) && fits(layer.value))
    return &attend_item;
#endif
  return nullptr;
}

}  // namespace attention
}  // namespace backplane::cpu
