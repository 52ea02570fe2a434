// Declares what the attention operators (attention.cpp) and their kernels (attention_kernels.cpp) share.
//
// Work is cut into items: some query rows of one request, all query heads that share one key head, and a range of keys.
// The cut depends on the request alone, never on the number of threads or on the other requests, so neither does the
// result of a request.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace backplane::cpu::attention {

// Converts `count` rows to float32, the first at base[offset], into `to`, `to_stride` floats apart; pads each row with
// zeros.
using LoadRows = void (*)(const void* base, int64_t offset, int64_t row_stride, int64_t count, int64_t width,
                          int64_t spread, float* to, int64_t to_stride);
// Rounds one row to the storage type.
using StoreRow = void (*)(const float* from, void* base, int64_t offset, int64_t width, int64_t spread);

LoadRows row_loader(at::ScalarType type);
StoreRow row_storer(at::ScalarType type);
bool is_storage_type(at::ScalarType type);

// The layout of a matrix of heads in memory, in elements; `spread` is the stride of the last dimension.
struct Heads {
  const void* data;
  LoadRows load;
  int64_t head_stride, spread, width;
  int64_t bytes;  // of one element
};

// The parameters that all items of a call share.
struct Layer {
  float scale, soft_cap, value_scale;
  bool causal;
  int64_t window;
  const float* slopes;  // ALiBi slopes, one per query head, or null
  const float* sinks;
  int64_t group;  // query heads per key head
  Heads query, key, value;
  int64_t query_row_stride;
  void* out;
  StoreRow store;
  int64_t out_row_stride, out_head_stride, out_spread;
};

// The location of a request's keys: position p of key head 0 begins at key_at(p).
struct Context {
  // KV block numbers; null if keys lie in rows (varlen attention).
  const int32_t* blocks = nullptr;
  int64_t block_size = 1;
  int64_t first = 0;  // the first of the rows
  int64_t key_block = 0, key_step = 0, value_block = 0, value_step = 0;
};

struct Item {
  const Context* context;
  int64_t row, rows;       // first row, and number of rows, in query and out
  int64_t position;        // position of the first row in the context
  int64_t length;          // length of the context
  int64_t key_head;
  int64_t first_key, end_key;
  float* partial;  // result for a piece of the context, merged later; null: the item is whole and writes `out`
};

// Returns the first key that a row at `position` attends to; seen_end() returns the one after the last.
inline int64_t first_seen(const Layer& layer, int64_t position) {
  const int64_t first = position - layer.window + 1;
  return layer.window > 0 && first > 0 ? first : 0;
}
inline int64_t seen_end(const Layer& layer, int64_t position, int64_t length) {
  int64_t end = length;
  if (layer.causal)
    end = position + 1;
  else if (layer.window > 0)
    end = position + layer.window;
  return end < 0 ? 0 : end < length ? end : length;
}

// Floats of a partial result: per (row, head) the running maximum, the sum of weights, and the weighted sum of values.
inline int64_t partial_stride(const Layer& layer) { return layer.value.width + 2; }

using Scratch = std::vector<float>;
using Attend = void (*)(const Layer&, const Item&, Scratch&);
// Merges `pieces` partial results of an item, `piece_stride` floats apart, into `out`.
using Merge = void (*)(const Layer&, const Item&, const float* partials, int64_t pieces, int64_t piece_stride,
                       Scratch&);

Attend attend();
Merge merge();

// Returns the variant with AMX bfloat16 tiles (attention_amx.cpp), for items of kQueriesForTiles queries or more.
// Returns null if the machine has no AMX or a tensor of the layer is not bfloat16.
constexpr int64_t kQueriesForTiles = 32;
Attend attend_by_tiles(const Layer& layer);

}  // namespace backplane::cpu::attention
