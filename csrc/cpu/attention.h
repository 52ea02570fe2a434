// What the operators (attention.cpp) and the arithmetic of attention (attention_kernels.cpp) share.
//
// Work is cut into items: some query rows of one request, all query heads that share one key head, and a range of keys.
// The cut depends on the request alone, never on the number of threads or on the other requests, so the result of a
// request does not depend on them either.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace backplane::cpu::attention {

// Widens `count` rows, the first at base[offset], into `to`, `to_stride` floats apart; the rest of each is zeroed.
using LoadRows = void (*)(const void* base, int64_t offset, int64_t row_stride, int64_t count, int64_t width,
                          int64_t spread, float* to, int64_t to_stride);
// Rounds one row.
using StoreRow = void (*)(const float* from, void* base, int64_t offset, int64_t width, int64_t spread);

LoadRows row_loader(at::ScalarType type);
StoreRow row_storer(at::ScalarType type);
bool is_storage_type(at::ScalarType type);

// A matrix of heads in memory, in elements; `spread` is the stride of the last dimension.
struct Heads {
  const void* data;
  LoadRows load;
  int64_t head_stride, spread, width;
  int64_t bytes;  // of an element
};

// Everything that holds for all items of a call.
struct Layer {
  float scale, soft_cap, value_scale;
  bool causal;
  int64_t window;
  const float* slopes;  // per query head, or null
  const float* sinks;
  int64_t group;  // query heads per key head
  Heads query, key, value;
  int64_t query_row_stride;
  void* out;
  StoreRow store;
  int64_t out_row_stride, out_head_stride, out_spread;
};

// Where a request's keys are: position p of key head 0 begins at key_at(p).
struct Context {
  // Pages; null where keys lie in rows.
  const int32_t* blocks = nullptr;
  int64_t block_size = 1;
  int64_t first = 0;  // of the rows
  int64_t key_block = 0, key_step = 0, value_block = 0, value_step = 0;
};

struct Item {
  const Context* context;
  int64_t row, rows;       // in query and out
  int64_t position;        // of the first row
  int64_t length;          // of the context
  int64_t key_head;
  int64_t first_key, end_key;
  float* partial;  // result of a piece of the context, to be merged; null: the item is whole and writes `out`
};

// The first key that a row at `position` sees, and the one after the last.
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

// Floats of a partial result: per (row, head) the peak, the sum of weights and the mixed values.
inline int64_t partial_stride(const Layer& layer) { return layer.value.width + 2; }

using Scratch = std::vector<float>;
using Attend = void (*)(const Layer&, const Item&, Scratch&);
// Merges `pieces` partial results of an item, `piece_stride` floats apart, into `out`.
using Merge = void (*)(const Layer&, const Item&, const float* partials, int64_t pieces, int64_t piece_stride,
                       Scratch&);

Attend attend();
Merge merge();

// The same with the processor's bfloat16 tiles (attention_tiles.cpp), for items of so many queries; null where the
// machine has none or a type of the layer is another.
constexpr int64_t kQueriesForTiles = 32;
Attend attend_by_tiles(const Layer& layer);

}  // namespace backplane::cpu::attention
