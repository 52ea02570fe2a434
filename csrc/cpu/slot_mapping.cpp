// Computes the KV cache slot of each scheduled token, with a loop over requests and their tokens.

#include <torch/library.h>

#include "rows.h"

namespace backplane::cpu {
namespace {

void compute_slot_mapping(const at::Tensor& query_start_loc, const at::Tensor& positions, const at::Tensor& block_table,
                          const at::Tensor& slot_mapping, int64_t block_size, int64_t pad_slot, int64_t cp_world_size,
                          int64_t cp_rank, int64_t cp_interleave, std::optional<int64_t> table_block_size) {
  const char* name = "compute_slot_mapping";
  const int64_t tokens = positions.size(0), slots = slot_mapping.size(0);
  const int64_t size = table_block_size.value_or(block_size);
  TORCH_CHECK(tokens <= slots, name, ": ", tokens, " tokens do not fit a slot_mapping of ", slots);
  TORCH_CHECK(block_size > 0 && size > 0 && cp_world_size > 0 && cp_interleave > 0, name,
              ": block sizes, cp_world_size and cp_interleave must be positive");
  const bool wide = slot_mapping.scalar_type() == at::kLong;
  TORCH_CHECK(slot_mapping.dim() == 1 && (wide || slot_mapping.scalar_type() == at::kInt), name,
              ": slot_mapping must be a vector of 32-bit or 64-bit integers");
  TORCH_CHECK(query_start_loc.dim() == 1 && positions.dim() == 1 && block_table.dim() == 2 &&
                  query_start_loc.size(0) >= 1 && query_start_loc.size(0) - 1 <= block_table.size(0),
              name, ": block_table of shape ", block_table.sizes(), " does not match query_start_loc with ",
              query_start_loc.size(0), " entries");
  const Integers ends(query_start_loc, name), at_position(positions, name), table(block_table, name);
  void* target = slot_mapping.mutable_data_ptr();
  const int64_t stride = slot_mapping.stride(0);
  const auto put = [&](int64_t token, int64_t slot) {
    if (wide) {
      static_cast<int64_t*>(target)[token * stride] = slot;
      return;
    }
    // Truncated to 32 bits, it would be the slot of another token.
    TORCH_CHECK(slot == static_cast<int32_t>(slot), name, ": slot ", slot,
                " does not fit into 32 bits; use a 64-bit slot_mapping");
    static_cast<int32_t*>(target)[token * stride] = static_cast<int32_t>(slot);
  };
  const int64_t span = block_size * cp_world_size, per_block = block_size / size, requests = ends.size() - 1;
  int64_t token = 0;
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t end = std::min(ends[request + 1], tokens);
    for (; token < end; ++token) {
      const int64_t position = at_position[token], block = position / span, offset = position % span;
      TORCH_CHECK(position >= 0, name, ": position ", position, " of request ", request, " is negative");
      if (offset / cp_interleave % cp_world_size != cp_rank) {
        put(token, pad_slot);
        continue;
      }
      const int64_t local = offset / (cp_world_size * cp_interleave) * cp_interleave + offset % cp_interleave;
      const int64_t column = block * per_block + local / size;
      TORCH_CHECK(column < table.size(), name, ": position ", position, " of request ", request,
                  " is outside its row of block_table, which has ", table.size(), " blocks of ", size);
      int64_t slot = table.at(request, column);
      const bool is_past = __builtin_mul_overflow(slot, size, &slot) || __builtin_add_overflow(slot, local % size, &slot);
      TORCH_CHECK(!is_past, name, ": request ", request, " has block ", table.at(request, column), " in column ",
                  column, " of block_table, which is out of range");
      put(token, slot);
    }
  }
  for (; token < slots; ++token) put(token, pad_slot);
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("compute_slot_mapping", &backplane::cpu::compute_slot_mapping);
}
