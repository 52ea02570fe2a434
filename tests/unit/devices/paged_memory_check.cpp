// Calls attention over a paged KV cache, and the operators that write the cache, with random and invalid block tables,
// lengths and slots.
//
// Each call must give the result of a plain loop, or raise c10::Error and leave its result unchanged. The program is
// for the sanitizers, which see every tensor because PyTorch takes its memory from the C library. The sources are
// included in this file, so that PyTorch's headers are parsed once and internal functions can be called.

#include "attention.cpp"
#include "attention_kernels.cpp"
#include "attention_amx.cpp"
#include "features.cpp"
#include "isa.cpp"
#include "kv_cache.cpp"
#include "rotary.cpp"
#include "slot_mapping.cpp"

#include "fuzzed_tensors.h"

namespace {

// --- attention -------------------------------------------------------------------------------------------------------

struct Style {
  double scale = 1.0, soft_cap = 0.0, k_scale = 1.0, v_scale = 1.0;
  bool causal = true;
  int64_t window = 0;
  std::optional<at::Tensor> slopes, sinks;

  Style(int64_t heads, int64_t width) : scale(1.0 / std::sqrt(double(std::max<int64_t>(1, width)))) {
    causal = !once_in(3);
    window = one_of<int64_t>({0, 0, 0, -1, 1, 3, 20, kMost64, kLeast64});
    if (once_in(4)) soft_cap = 2.0;
    if (once_in(4)) slopes = numbers({heads}, {0}, at::kFloat);
    if (once_in(4)) sinks = numbers({heads}, {0}, one_of({at::kFloat, at::kBFloat16}));
  }

  bool sees(int64_t position, int64_t key) const {
    if (causal && key > position) return false;
    if (window <= 0) return true;
    return key - position > -window && (causal || key - position < window);
  }
};

// The value of one result, and the sum of the magnitudes of its terms.
struct Sum {
  double value = 0, size = 0;
};

// Computes one query over keys [0, length): score(key) is a dot product, value(key) a number of the result.
Sum attended(const Style& style, int64_t head, int64_t position, int64_t length,
             const std::function<double(int64_t)>& score, const std::function<double(int64_t)>& value) {
  std::vector<std::pair<int64_t, double>> seen;
  const double sink = style.sinks ? Plain(*style.sinks)({head}) : -INFINITY;
  const double slope = style.slopes ? Plain(*style.slopes)({head}) : 0.0;
  double top = sink;
  for (int64_t key = 0; key < length; ++key) {
    if (!style.sees(position, key)) continue;
    double s = score(key) * style.scale * style.k_scale;
    if (style.soft_cap > 0) s = style.soft_cap * std::tanh(s / style.soft_cap);
    s += slope * double(key - position);
    seen.emplace_back(key, s);
    top = std::max(top, s);
  }
  if (seen.empty()) return {};
  double total = style.sinks ? std::exp(sink - top) : 0.0;
  for (const auto& [key, s] : seen) total += std::exp(s - top);
  Sum sum;
  for (const auto& [key, s] : seen) {
    const double part = std::exp(s - top) / total * value(key) * style.v_scale;
    sum.value += part;
    sum.size += std::abs(part);
  }
  return sum;
}

void expect_close(const char* what, double found, const Sum& expected, at::ScalarType type) {
  const double bound = 3e-5 * expected.size + std::abs(expected.value) * step_of(type) * 1.01 + 1e-6;
  if (!(std::abs(found - expected.value) <= bound))
    fail(what, "is " + std::to_string(found) + ", not " + std::to_string(expected.value));
}

constexpr double kUntouched = 9.0;

void check_paged_attention() {
  const char* what = "paged_attention";
  const auto type = one_of({at::kFloat, at::kBFloat16, at::kHalf});
  const auto stored = one_of({type, type, at::kFloat, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2});
  const int64_t kv_heads = between(1, 3), group = one_of<int64_t>({1, 1, 2, 3, 4, 5, 7, 20}), heads = kv_heads * group;
  const int64_t width = one_of<int64_t>({1, 3, 4, 5, 8, 16, 17, 33, 64, 80});
  const int64_t value_width = once_in(2) ? width : one_of<int64_t>({1, 2, 7, 16, 24, 65});
  const bool is_long = once_in(12);  // contexts that are split into pieces
  const int64_t block_size = is_long ? one_of<int64_t>({13, 16, 32}) : one_of<int64_t>({1, 2, 3, 4, 7, 16});
  const int64_t blocks = between(1, 12), requests = once_in(12) ? 0 : between(1, 4);
  const int64_t columns = is_long ? 600 / block_size + between(0, 3) : between(0, 6);
  const bool wide_table = once_in(3), wide_lengths = once_in(2);

  std::vector<int64_t> starts{0}, lengths, table;
  for (int64_t i = 0; i < requests; ++i) {
    const int64_t room = columns * block_size;
    const int64_t length = once_in(8) ? room : below(room + 1);
    const int64_t some = std::min(between(1, 6), std::max<int64_t>(1, length));
    const int64_t rows = once_in(6) ? 0 : once_in(10) ? between(1, 40) : once_in(2) ? 1 : some;
    starts.push_back(starts.back() + rows);
    lengths.push_back(length);
    for (int64_t c = 0; c < columns; ++c) table.push_back(below(blocks));  // some blocks twice, some of another request
  }
  const int64_t tokens = starts.back() + between(0, 2);
  Style style(heads, width);
  if (once_in(3)) style.k_scale = 0.5, style.v_scale = 2.0;

  // At most one argument is wrong.
  bool fits = true;
  int64_t query_heads = heads, query_width = width, out_width = value_width;
  int64_t table_rows = requests, length_count = requests;
  bool spread_bounds = false;
  switch (below(20)) {
    case 0: case 1: case 2:
      if (!table.empty()) table[below(int64_t(table.size()))] = strange_block(blocks, wide_table);
      break;
    case 3: case 4:
      if (requests > 0)
        lengths[below(requests)] = wide_lengths && once_in(2)
                                       ? one_of({kMost64, kLeast64, int64_t(1) << 32})
                                       : one_of({columns * block_size + 1, kMost32, kLeast32, int64_t(-1)});
      break;
    case 5: starts[below(requests + 1)] = one_of({int64_t(-1), tokens + 1, kLeast32, kMost32}); break;
    case 6: table_rows = requests - 1; fits = requests == 0; break;
    case 7: length_count = requests - 1; fits = requests == 0; break;
    case 8: query_heads = one_of<int64_t>({0, heads + 1}); fits = query_heads > 0 && query_heads % kv_heads == 0; break;
    case 9: query_width = width + one_of<int64_t>({-1, 1}); fits = false; break;
    case 10: out_width = value_width + 1; fits = false; break;
    case 11: spread_bounds = true; fits = false; break;
    default: break;
  }
  if (table_rows < 0) table_rows = 0;
  if (length_count < 0) length_count = 0;
  if (query_heads != heads) {
    if (style.slopes) style.slopes = numbers({query_heads}, {0}, at::kFloat);
    if (style.sinks) style.sinks = numbers({query_heads}, {0}, at::kFloat);
  }

  // Marks what is read, by the rules above; the rest of the cache is NaN, and the rest of the table is not a block
  // number.
  std::vector<char> is_read(blocks * block_size), is_named(table.size());
  for (int64_t i = 0; i < requests && fits; ++i) {
    if (starts[i] < 0 || starts[i] > starts[i + 1] || starts[i + 1] > tokens) fits = false;
    const int64_t rows = fits ? starts[i + 1] - starts[i] : 0, length = std::max<int64_t>(0, lengths[i]);
    if (rows > 0 && length > columns * block_size) fits = false;
    for (int64_t key = 0; key < length && rows > 0 && fits; ++key) {
      bool seen = false;
      for (int64_t r = 0; r < rows; ++r) seen = seen || style.sees(length - rows + r, key);
      if (!seen) continue;
      const int64_t entry = i * columns + key / block_size, block = table[entry];
      is_named[entry] = 1;
      if (block < 0 || block >= blocks) fits = false;
      else is_read[block * block_size + key % block_size] = 1;
    }
  }
  if (fits)
    for (size_t e = 0; e < table.size(); ++e)
      if (!is_named[e]) table[e] = strange_block(blocks, wide_table);

  const Sizes inner = once_in(2) ? Sizes{0, 1, 2, 3} : once_in(3) ? Sizes{0, 1, 3, 2} : Sizes{0, 2, 1, 3};
  at::Tensor keys, values;
  if (once_in(2)) {
    keys = numbers({blocks, kv_heads, block_size, width}, inner, stored);
    values = numbers({blocks, kv_heads, block_size, value_width}, inner, stored);
  } else {  // as in vLLM: side by side
    const at::Tensor both = numbers({blocks, kv_heads, block_size, width + value_width}, inner, stored);
    keys = both.narrow(3, 0, width);
    values = both.narrow(3, width, value_width);
  }
  for (int64_t slot = 0; slot < blocks * block_size; ++slot) {
    if (is_read[slot]) continue;
    for (at::Tensor* cache : {&keys, &values})
      cache->select(0, slot / block_size).select(1, slot % block_size).fill_(kNan);
  }
  const at::Tensor query = numbers({tokens, query_heads, query_width}, {0, 1, 2}, type);
  at::Tensor out = laid_out({tokens, query_heads, out_width}, once_in(4) ? Sizes{1, 0, 2} : Sizes{0, 1, 2}, type);
  out.fill_(kUntouched);
  table.resize(table_rows * columns);
  lengths.resize(length_count);
  const at::Tensor blocks_of = integers({table_rows, columns}, table, wide_table ? at::kLong : at::kInt);
  const at::Tensor lengths_of = integers({length_count}, lengths, wide_lengths ? at::kLong : at::kInt);
  at::Tensor bounds = integers({requests + 1}, starts, once_in(3) ? at::kLong : at::kInt);
  if (spread_bounds) bounds = bounds.unsqueeze(1);

  if (!goes_through(what, fits, {out}, [&] {
        backplane::cpu::attention::paged_attention(query, keys, values, blocks_of, bounds, lengths_of, style.scale,
                                                   style.causal, style.window, style.soft_cap, style.slopes,
                                                   style.sinks, style.k_scale, style.v_scale, out);
      }))
    return;
  const Plain q(query), k(keys), v(values), got(out);
  std::vector<char> is_owned(tokens);
  const int64_t true_group = query_heads / kv_heads;
  for (int64_t i = 0; i < requests; ++i) {
    const int64_t rows = starts[i + 1] - starts[i], length = std::max<int64_t>(0, lengths[i]);
    for (int64_t r = 0; r < rows; ++r) {
      is_owned[starts[i] + r] = 1;
      for (int64_t h = 0; h < query_heads; ++h) {
        const auto block = [&](int64_t key) { return table[i * columns + key / block_size]; };
        const auto score = [&](int64_t key) {
          double sum = 0;
          for (int64_t d = 0; d < width; ++d)
            sum += q({starts[i] + r, h, d}) * k({block(key), h / true_group, key % block_size, d});
          return sum;
        };
        const int64_t d = below(value_width);  // one number of each result: a wrong key, weight or row affects all
        const auto value = [&](int64_t key) { return v({block(key), h / true_group, key % block_size, d}); };
        const Sum expected = attended(style, h, length - rows + r, length, score, value);
        expect_close(what, got({starts[i] + r, h, d}), expected, type);
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < query_heads && !is_owned[t]; ++h)
      if (got({t, h, 0}) != kUntouched) fail(what, "wrote a row that belongs to no request");
}

void check_varlen_attention() {
  const char* what = "varlen_attention";
  const auto type = one_of({at::kFloat, at::kBFloat16, at::kHalf});
  const int64_t kv_heads = between(1, 3), heads = kv_heads * between(1, 5);
  const int64_t width = between(1, 40), value_width = between(1, 40);
  std::vector<int64_t> starts{0};
  for (int64_t i = below(4); i > 0; --i) starts.push_back(starts.back() + below(12));
  const int64_t tokens = starts.back() + below(3), key_rows = tokens - (once_in(10) && tokens > 0);
  if (once_in(4)) starts[below(int64_t(starts.size()))] = one_of({int64_t(-1), tokens + 1, kLeast32, kMost32});
  bool fits = key_rows >= tokens;
  for (size_t i = 0; i + 1 < starts.size(); ++i)
    fits = fits && starts[i] >= 0 && starts[i] <= starts[i + 1] && starts[i + 1] <= tokens;
  const Style style(heads, width);
  const at::Tensor query = numbers({tokens, heads, width}, {0, 1, 2}, type),
                   keys = numbers({key_rows, kv_heads, width}, {1, 0, 2}, type),
                   values = numbers({key_rows, kv_heads, value_width}, {0, 1, 2}, type);
  at::Tensor out = laid_out({tokens, heads, value_width}, {0, 1, 2}, type).fill_(kUntouched);
  const at::Tensor bounds = integers({int64_t(starts.size())}, starts, at::kInt);
  if (!goes_through(what, fits, {out}, [&] {
        backplane::cpu::attention::varlen_attention(query, keys, values, bounds, style.scale, style.causal,
                                                    style.window, style.soft_cap, style.slopes, style.sinks, out);
      }))
    return;
  const Plain q(query), k(keys), v(values), got(out);
  for (size_t i = 0; i + 1 < starts.size(); ++i)
    for (int64_t row = starts[i]; row < starts[i + 1]; ++row)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t first = starts[i], kv = h / (heads / kv_heads), d = below(value_width);
        const auto score = [&](int64_t key) {
          double sum = 0;
          for (int64_t e = 0; e < width; ++e) sum += q({row, h, e}) * k({first + key, kv, e});
          return sum;
        };
        const auto value = [&](int64_t key) { return v({first + key, kv, d}); };
        const Sum expected = attended(style, h, row - first, starts[i + 1] - first, score, value);
        expect_close(what, got({row, h, d}), expected, type);
      }
}

// --- what writes the cache -------------------------------------------------------------------------------------------

// Computes slots from positions and a block table, and writes rows of keys and values there.
void check_writing() {
  const int64_t requests = below(4), columns = between(0, 5), blocks = between(1, 9);
  const int64_t block_size = one_of<int64_t>({1, 2, 3, 8, 16});
  const int64_t ranks = once_in(4) ? 2 : 1, rank = ranks == 2 ? below(2) : 0, run = ranks == 2 ? between(1, 3) : 1;
  const bool wide_table = once_in(3), wide_slots = !once_in(3);
  std::vector<int64_t> bounds{0}, positions, table;
  for (int64_t i = 0; i < requests; ++i) {
    const int64_t count = columns > 0 ? below(6) : 0;
    bounds.push_back(bounds.back() + count);
    for (int64_t t = 0; t < count; ++t) positions.push_back(below(columns * block_size * ranks));
    for (int64_t c = 0; c < columns; ++c)
      table.push_back(once_in(12) ? strange_block(blocks, wide_table) : below(blocks));
  }
  const int64_t spare = below(3);  // tokens of no request, with any position
  for (int64_t t = 0; t < spare; ++t) positions.push_back(one_of({int64_t(-1), kMost64, kLeast64, int64_t(0)}));
  const auto tokens = static_cast<int64_t>(positions.size());
  if (once_in(8) && tokens > spare)
    positions[below(tokens - spare)] = one_of({int64_t(-1), kLeast64, kMost64, columns * block_size * ranks});
  if (once_in(10)) bounds[below(requests + 1)] = one_of({int64_t(-1), kLeast32, kMost32, tokens + 1});
  const int64_t table_rows = once_in(10) ? std::max<int64_t>(0, requests - 1) : requests;
  const int64_t room = once_in(10) ? std::max<int64_t>(0, tokens - 1) : tokens + below(3);

  bool fits = table_rows >= requests && room >= tokens;
  std::vector<int64_t> expected(room, -1);
  int64_t token = 0;
  for (int64_t i = 0; i < requests && fits; ++i)
    for (; token < std::min(bounds[i + 1], tokens) && fits; ++token) {
      const int64_t position = positions[token], span = block_size * ranks, offset = position % span;
      if (position < 0) fits = false;
      else if (offset / run % ranks == rank) {
        const int64_t local = offset / (ranks * run) * run + offset % run;
        const int64_t column = position / span + local / block_size;
        if (column >= columns) { fits = false; continue; }
        int64_t slot = table[i * columns + column];
        if (__builtin_mul_overflow(slot, block_size, &slot) || __builtin_add_overflow(slot, local % block_size, &slot))
          fits = false;
        else if (!wide_slots && (slot < kLeast32 || slot > kMost32)) fits = false;
        expected[token] = slot;
      }
    }
  table.resize(table_rows * columns);
  const at::Tensor where = integers({tokens}, positions, at::kLong), ends = integers({requests + 1}, bounds, at::kInt),
                   given = integers({table_rows, columns}, table, wide_table ? at::kLong : at::kInt);
  const at::Tensor slots = integers({room}, std::vector<int64_t>(room, 77), wide_slots ? at::kLong : at::kInt);
  // An error in the middle of the loop leaves earlier slots written; nothing reads them then.
  if (!goes_through("compute_slot_mapping", fits, {}, [&] {
        backplane::cpu::compute_slot_mapping(ends, where, given, slots, block_size, -1, ranks, rank, run, std::nullopt);
      }))
    return;
  const backplane::cpu::Integers got(slots, "slots");
  for (int64_t t = 0; t < room; ++t)
    if (got[t] != expected[t])
      fail("compute_slot_mapping", "token " + std::to_string(t) + " has slot " + std::to_string(got[t]) + ", not " +
                                       std::to_string(expected[t]));

  const auto type = one_of({at::kFloat, at::kBFloat16, at::kHalf}), stored = once_in(3) ? at::kFloat : type;
  const int64_t heads = between(1, 3), width = one_of<int64_t>({1, 3, 8, 17, 33});
  const int64_t rows = once_in(10) ? room - 1 : room + below(2);
  if (rows < 0) return;
  const at::Tensor key = numbers({rows, heads, width}, once_in(3) ? Sizes{1, 0, 2} : Sizes{0, 1, 2}, type);
  const at::Tensor value = numbers({rows, heads, width}, {0, 1, 2}, type);
  const Sizes order = once_in(2) ? Sizes{0, 1, 2, 3} : once_in(3) ? Sizes{0, 1, 3, 2} : Sizes{0, 2, 1, 3};
  at::Tensor keys = laid_out({blocks, heads, block_size, width}, order, stored).fill_(kUntouched);
  at::Tensor values = laid_out({blocks, heads, block_size, width}, order, stored).fill_(kUntouched);
  bool may = rows >= room || room == 0;
  for (const int64_t slot : expected) may = may && slot < blocks * block_size;
  if (!goes_through("kv_cache_write", may, {keys, values}, [&] {
        backplane::cpu::kv_cache_write(key, value, keys, values, slots, 1.0, 1.0);
      }))
    return;
  for (const auto& [rows_of, cache] : {std::pair{&key, &keys}, {&value, &values}}) {
    const Plain from(rows_of->to(stored)), to(*cache);
    for (int64_t slot = 0; slot < blocks * block_size; ++slot)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < width; ++d) {
          // If two tokens have one slot, either may be written last.
          const double found = to({slot / block_size, h, slot % block_size, d});
          bool is_one = false, is_named = false;
          for (int64_t t = 0; t < room; ++t)
            if (expected[t] == slot) is_named = true, is_one = is_one || from({t, h, d}) == found;
          if (is_named ? !is_one : found != kUntouched)
            fail("kv_cache_write", "slot " + std::to_string(slot) + " has " + std::to_string(found));
        }
  }
}

void check_zeroing() {
  const int64_t blocks = between(0, 6), count = below(5);
  const bool wide = once_in(2);
  std::vector<int64_t> ids;
  bool fits = true;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(blocks > 0 && !once_in(8) ? between(-blocks, blocks - 1) : strange_block(blocks, wide));
    fits = fits && ids.back() >= -blocks && ids.back() < blocks;
  }
  const auto type = one_of({at::kFloat, at::kHalf, at::kByte, at::kFloat8_e4m3fn});
  const Sizes order = once_in(3) ? Sizes{1, 0, 2} : Sizes{0, 2, 1};
  at::Tensor cache = laid_out({blocks, between(1, 3), between(1, 9)}, order, type).fill_(kUntouched);
  const at::Tensor given = integers({count}, ids, wide ? at::kLong : at::kInt);
  if (!goes_through("kv_cache_zero_blocks", fits, {cache},
                    [&] { backplane::cpu::kv_cache_zero_blocks(cache, given); }))
    return;
  const Plain got(cache);
  for (int64_t b = 0; b < blocks; ++b) {
    bool is_named = false;
    for (const int64_t id : ids) is_named = is_named || id == b || id + blocks == b;
    for (int64_t i = 0; i < cache.size(1); ++i)
      for (int64_t j = 0; j < cache.size(2); ++j)
        if (got({b, i, j}) != (is_named ? 0.0 : kUntouched)) fail("kv_cache_zero_blocks", "block " + std::to_string(b));
  }
}

void check_rotary() {
  const char* what = "rotary_embedding";
  const auto type = one_of({at::kFloat, at::kBFloat16, at::kHalf});
  const int64_t head = one_of<int64_t>({0, 1, 2, 5, 8, 16, 33, 64}), heads = between(1, 4);
  const int64_t tokens = below(7), length = between(1, 20);
  const int64_t columns = once_in(10) ? head + 1 : 2 * below(head / 2 + 1);
  const bool neox = once_in(2), wrong_width = once_in(12);
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < tokens; ++t)
    positions.push_back(once_in(25) ? one_of({int64_t(-1), length, kLeast32, kMost32}) : below(length));
  bool fits = head > 0 && columns % 2 == 0 && columns <= head && !(wrong_width && tokens > 0 && head > 1);
  for (const int64_t position : positions) fits = fits && position >= 0 && position < length;
  const Sizes order = once_in(2) ? Sizes{0, 2, 1} : Sizes{1, 0, 2};
  const at::Tensor query = once_in(3) && !wrong_width ? numbers({tokens, heads, head}, order, type)
                                                      : numbers({tokens, heads * head + wrong_width}, {0, 1}, type);
  const at::Tensor table = numbers({length, columns}, {0, 1}, one_of({at::kFloat, type}));
  const at::Tensor where = integers({tokens}, positions, once_in(2) ? at::kLong : at::kInt), before = query.clone();
  if (query.dim() == 2 && query.stride(1) != 1 && query.size(0) > 1) return;  // heads are not a view: may raise
  if (!goes_through(what, fits, {query}, [&] {
        backplane::cpu::rotary_embedding(where, query, std::nullopt, table, head, neox);
      }))
    return;
  if (tokens == 0) return;
  const int64_t half = columns / 2;
  const Plain x(before.reshape({tokens, -1})), got(query.reshape({tokens, -1})), angles(table);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < x.wide.size(1); ++i) {
      const int64_t base = i / head * head, d = i % head;
      if (d >= columns) {
        if (got({t, i}) != x({t, i})) fail(what, "turned what is not rotated");
        continue;
      }
      const int64_t pair = neox ? d % half : d / 2;
      const int64_t first = neox ? pair : 2 * pair, second = neox ? pair + half : 2 * pair + 1;
      const double c = angles({positions[t], pair}), s = angles({positions[t], half + pair});
      const double a = x({t, base + first}), b = x({t, base + second});
      const double expected = d == first ? a * c - b * s : b * c + a * s;
      expect_close(what, got({t, i}), {expected, std::abs(a) + std::abs(b)}, type);
    }
}

}  // namespace

int main() {
  at::set_num_threads(2);
  for (int i = 0; i < 1000; ++i) check_paged_attention();
  for (int i = 0; i < 200; ++i) check_varlen_attention();
  for (int i = 0; i < 500; ++i) check_writing();
  for (int i = 0; i < 200; ++i) check_zeroing();
  for (int i = 0; i < 300; ++i) check_rotary();
  std::printf("%d calls as expected, %d of them refused\n", calls, refusals);
}
