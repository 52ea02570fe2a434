// Implements attention over a paged KV cache and over ragged rows: checks the arguments and cuts the work into items.

#include <torch/library.h>

#include <atomic>

#include "attention.h"
#include "rows.h"

namespace backplane::cpu::attention {
namespace {

constexpr int64_t kQueriesPerItem = 128;  // rows times heads of a group; K and V are widened once for all of them
constexpr int64_t kQueriesToSplit = 64;   // up to this many, the context is split too: there is no other work to share
constexpr int64_t kKeysPerPiece = 512;
constexpr int64_t kWidestWindow = int64_t(1) << 40;  // wider than any context; adding a position cannot overflow
constexpr int64_t kProductsPerThread = 1 << 17;  // multiplications that justify one more thread

struct Split {
  int64_t item, pieces;
};

class Plan {
 public:
  Plan(const Layer& layer, int64_t requests) : layer_(layer) { contexts_.reserve(requests); }

  // Adds a request with `rows` query rows from `row` on: the last of its `length` positions.
  void add(const Context& given, int64_t row, int64_t rows, int64_t length, int64_t key_heads) {
    contexts_.push_back(given);
    const int64_t first_position = length - rows;
    const int64_t step = std::max<int64_t>(1, kQueriesPerItem / layer_.group);
    for (int64_t start = 0; start < rows; start += step) {
      Item item{};
      item.context = &contexts_.back();
      item.row = row + start;
      item.rows = std::min(step, rows - start);
      item.position = first_position + start;
      item.length = length;
      item.first_key = first_seen(layer_, item.position);
      item.end_key = seen_end(layer_, item.position + item.rows - 1, length);
      item.end_key = std::max(item.first_key, item.end_key);
      for (item.key_head = 0; item.key_head < key_heads; ++item.key_head) cut(item);
    }
  }

  void run() {
    for (auto& [index, place] : partial_places_) items_[index].partial = partials_at(place);
    const Attend few = attend(), tiles = attend_by_tiles(layer_), many = tiles ? tiles : few;
    over(items_.size(), products_, [&](int64_t i, Scratch& scratch) {
      (items_[i].rows * layer_.group < kQueriesForTiles ? few : many)(layer_, items_[i], scratch);
    });
    if (splits_.empty()) return;
    const Merge merge_pieces = merge();
    over(splits_.size(), partial_floats_, [&](int64_t i, Scratch& scratch) {
      const Item& item = items_[splits_[i].item];
      merge_pieces(layer_, item, item.partial, splits_[i].pieces, partial_size(item), scratch);
    });
  }

 private:
  int64_t partial_size(const Item& item) const { return item.rows * layer_.group * partial_stride(layer_); }

  float* partials_at(int64_t place) {
    if (partials_.empty()) partials_.resize(partial_floats_);
    return partials_.data() + place;
  }

  void cut(Item item) {
    const int64_t keys = item.end_key - item.first_key, queries = item.rows * layer_.group;
    products_ += keys * queries * (layer_.key.width + layer_.value.width) + queries * layer_.value.width;
    const int64_t pieces = queries <= kQueriesToSplit ? (keys + kKeysPerPiece - 1) / kKeysPerPiece : 1;
    if (pieces <= 1) {
      items_.push_back(item);
      return;
    }
    splits_.push_back({static_cast<int64_t>(items_.size()), pieces});
    const int64_t first = item.first_key, end = item.end_key, each = (keys + pieces - 1) / pieces;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      item.first_key = std::min(end, first + piece * each);
      item.end_key = std::min(end, item.first_key + each);
      partial_places_.emplace_back(items_.size(), partial_floats_);
      partial_floats_ += partial_size(item);
      items_.push_back(item);
    }
  }

  // Items differ in length, so each thread takes the next item when it has finished one.
  template <class F>
  static void over(int64_t count, int64_t cost, F&& call) {
    const int64_t threads = std::min({count, cost / kProductsPerThread, static_cast<int64_t>(at::get_num_threads())});
    const auto scratch = []() -> Scratch& {
      static thread_local Scratch buffer;
      return buffer;
    };
    if (threads <= 1 || at::in_parallel_region()) {
      for (int64_t i = 0; i < count; ++i) call(i, scratch());
      return;
    }
    std::atomic<int64_t> next{0};
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      for (int64_t i = next++; i < count; i = next++) call(i, scratch());
    });
  }

  const Layer& layer_;
  std::vector<Context> contexts_;  // reserved at its final size, because items point into it
  std::vector<Item> items_;
  std::vector<Split> splits_;
  std::vector<std::pair<int64_t, int64_t>> partial_places_;
  std::vector<float> partials_;
  int64_t partial_floats_ = 0, products_ = 0;
};

Heads heads_of(const at::Tensor& tensor, int64_t head_dim) {
  return {tensor.const_data_ptr(), row_loader(tensor.scalar_type()), tensor.stride(head_dim), tensor.stride(-1),
          tensor.size(-1), static_cast<int64_t>(tensor.element_size())};
}

// Returns a per-head vector as float32; the tensor must outlive the call.
at::Tensor per_head(const char* name, const char* what, const std::optional<at::Tensor>& given, int64_t heads) {
  if (!given) return {};
  TORCH_CHECK(given->numel() == heads, name, ": ", what, " has shape ", given->sizes(), " for ", heads, " heads");
  return given->to(at::kFloat).reshape({heads}).contiguous();
}

struct Arguments {
  const char* name;
  const at::Tensor &query, &key, &value, &out;
  int64_t key_head_dim;
  double scale;
  bool causal;
  int64_t window;
  double soft_cap;
  double value_scale;
};

Layer layer_of(const Arguments& a, const at::Tensor& slopes, const at::Tensor& sinks) {
  const int64_t key_heads = a.key.size(a.key_head_dim);
  for (const at::Tensor* tensor : {&a.query, &a.out})
    TORCH_CHECK(is_float_type(tensor->scalar_type()), a.name, ": dtype ", tensor->scalar_type(),
                " is not supported; use float32, bfloat16 or float16");
  for (const at::Tensor* tensor : {&a.key, &a.value})
    TORCH_CHECK(is_storage_type(tensor->scalar_type()), a.name, ": KV cache dtype ", tensor->scalar_type(),
                " is not supported; use float32, bfloat16, float16, float8_e4m3fn or float8_e5m2");
  TORCH_CHECK(a.query.dim() == 3 && a.out.dim() == 3 && a.query.size(2) == a.key.size(-1) &&
                  a.out.size(2) == a.value.size(-1) && a.out.size(1) == a.query.size(1) &&
                  a.out.size(0) >= a.query.size(0) && a.value.size(a.key_head_dim) == key_heads,
              a.name, ": shapes of query ", a.query.sizes(), ", keys ", a.key.sizes(), ", values ", a.value.sizes(),
              " and out ", a.out.sizes(), " do not match");
  TORCH_CHECK(key_heads > 0 && a.query.size(1) > 0 && a.query.size(1) % key_heads == 0, a.name, ": ", a.query.size(1),
              " query heads cannot be divided evenly among ", key_heads, " key heads; ",
              "repeat or split the key heads first");
  TORCH_CHECK(a.query.size(2) > 0, a.name, ": the head size of query ", a.query.sizes(), " is 0");
  Layer layer{};
  layer.scale = static_cast<float>(a.scale);
  layer.soft_cap = static_cast<float>(a.soft_cap);
  layer.value_scale = static_cast<float>(a.value_scale);
  layer.causal = a.causal;
  layer.window = std::clamp<int64_t>(a.window, 0, kWidestWindow);
  layer.slopes = slopes.defined() ? slopes.const_data_ptr<float>() : nullptr;
  layer.sinks = sinks.defined() ? sinks.const_data_ptr<float>() : nullptr;
  layer.group = a.query.size(1) / key_heads;
  layer.query = heads_of(a.query, 1);
  layer.key = heads_of(a.key, a.key_head_dim);
  layer.value = heads_of(a.value, a.key_head_dim);
  layer.query_row_stride = a.query.stride(0);
  layer.out = a.out.mutable_data_ptr();
  layer.store = row_storer(a.out.scalar_type());
  layer.out_row_stride = a.out.stride(0);
  layer.out_head_stride = a.out.stride(1);
  layer.out_spread = a.out.stride(2);
  return layer;
}

void check_bounds(const char* name, int64_t request, int64_t begin, int64_t end, int64_t rows) {
  TORCH_CHECK(begin >= 0 && begin <= end && end <= rows, name, ": query_start_loc gives request ", request, " rows ",
              begin, " to ", end, ", but there are ", rows);
}

void paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                     const at::Tensor& block_table, const at::Tensor& query_start_loc, const at::Tensor& seq_lens,
                     double scale, bool causal, int64_t sliding_window, double soft_cap,
                     const std::optional<at::Tensor>& alibi_slopes, const std::optional<at::Tensor>& sinks,
                     double k_scale, double v_scale, const at::Tensor& out) {
  const char* name = "paged_attention";
  TORCH_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4 && key_cache.size(0) == value_cache.size(0) &&
                  key_cache.size(2) == value_cache.size(2) && key_cache.size(2) > 0,
              name, ": key cache ", key_cache.sizes(), " and value cache ", value_cache.sizes(), " do not match");
  const int64_t requests = query_start_loc.size(0) - 1, heads = query.dim() > 1 ? query.size(1) : 0;
  TORCH_CHECK(query_start_loc.dim() == 1 && seq_lens.dim() == 1 && requests >= 0 && seq_lens.size(0) >= requests &&
                  block_table.dim() == 2 && block_table.size(0) >= requests,
              name, ": seq_lens of shape ", seq_lens.sizes(), " and block_table of shape ", block_table.sizes(),
              " do not match the ", requests, " requests of query_start_loc");
  const at::Tensor slopes = per_head(name, "alibi_slopes", alibi_slopes, heads);
  const at::Tensor extra = per_head(name, "sinks", sinks, heads);
  const Layer layer = layer_of({name, query, key_cache, value_cache, out, 1, scale * k_scale, causal, sliding_window,
                                soft_cap, v_scale},
                               slopes, extra);
  // Blocks are checked before the conversion to 32 bits: a 64-bit number may be in range only because it was truncated.
  const Integers starts(query_start_loc, name), lengths(seq_lens, name), given(block_table, name);
  const at::Tensor narrow = block_table.to(at::kInt);
  const at::Tensor table = narrow.stride(1) == 1 || narrow.size(1) <= 1 ? narrow : narrow.contiguous();
  const int64_t block_size = key_cache.size(2), blocks = key_cache.size(0), columns = table.size(1);
  Context pages;
  pages.block_size = block_size;
  pages.key_block = key_cache.stride(0);
  pages.key_step = key_cache.stride(2);
  pages.value_block = value_cache.stride(0);
  pages.value_step = value_cache.stride(2);
  Plan plan(layer, requests);
  for (int64_t i = 0; i < requests; ++i) {
    const int64_t begin = starts[i], end = starts[i + 1], length = std::max<int64_t>(0, lengths[i]);
    check_bounds(name, i, begin, end, query.size(0));
    if (begin == end) continue;
    pages.blocks = table.const_data_ptr<int32_t>() + i * table.stride(0);
    TORCH_CHECK(length <= columns * block_size, name, ": request ", i, " has ", length, " keys, but its row of ",
                "block_table has room for ", columns, " blocks of ", block_size);
    // Checks only the entries that are read: those past the context and before the window may hold any value.
    const int64_t first = first_seen(layer, length - (end - begin)), last = seen_end(layer, length - 1, length);
    for (int64_t c = first / block_size; c * block_size < last; ++c)
      TORCH_CHECK(given.at(i, c) >= 0 && given.at(i, c) < blocks, name, ": request ", i, " has block ", given.at(i, c),
                  " in column ", c, " of block_table; the cache has ", blocks, " blocks");
    plan.add(pages, begin, end - begin, length, key_cache.size(1));
  }
  plan.run();
}

void varlen_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const at::Tensor& query_start_loc, double scale, bool causal, int64_t sliding_window,
                      double soft_cap, const std::optional<at::Tensor>& alibi_slopes,
                      const std::optional<at::Tensor>& sinks, const at::Tensor& out) {
  const char* name = "varlen_attention";
  TORCH_CHECK(key.dim() == 3 && value.dim() == 3 && key.size(0) == value.size(0) && query.dim() == 3 &&
                  key.size(0) >= query.size(0),
              name, ": shapes of query ", query.sizes(), ", keys ", key.sizes(), " and values ", value.sizes(),
              " do not match");
  const at::Tensor slopes = per_head(name, "alibi_slopes", alibi_slopes, query.size(1));
  const at::Tensor extra = per_head(name, "sinks", sinks, query.size(1));
  const Layer layer =
      layer_of({name, query, key, value, out, 1, scale, causal, sliding_window, soft_cap, 1.0}, slopes, extra);
  const Integers starts(query_start_loc, name);
  Context rows;
  rows.key_step = key.stride(0);
  rows.value_step = value.stride(0);
  Plan plan(layer, starts.size());
  for (int64_t i = 0; i + 1 < starts.size(); ++i) {
    const int64_t begin = starts[i], end = starts[i + 1];
    check_bounds(name, i, begin, end, query.size(0));
    if (begin == end) continue;
    rows.first = begin;
    plan.add(rows, begin, end - begin, end - begin, key.size(1));
  }
  plan.run();
}

}  // namespace
}  // namespace backplane::cpu::attention

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("paged_attention", &backplane::cpu::attention::paged_attention);
  library.impl("varlen_attention", &backplane::cpu::attention::varlen_attention);
}
