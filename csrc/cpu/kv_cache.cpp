// Writes keys and values into the paged KV cache: copies rows if cache and input have the same type, else converts
// them.

#include <torch/library.h>

#include <vector>

#include "fp8.h"
#include "isa.h"
#include "rows.h"

namespace backplane::cpu {
namespace {

template <class From, class To>
struct ConvertRow {
  template <int W>
  static BACKPLANE_INLINE void run(const From* from, int64_t n, float scale, To* to) {
    int64_t i = 0;
    for (; i + W <= n; i += W) write<W>(to + i, read<W>(from + i) / scale);
    if (i < n) write_some<W>(to + i, read_some<W>(from + i, n - i) / scale, n - i);
  }
};

template <class T>
struct CopyRow {
  template <int W>
  static BACKPLANE_INLINE void run(const T* from, int64_t n, float, T* to) {
    std::memcpy(static_cast<void*>(to), from, n * sizeof(T));
  }
};

template <class F>
auto with_storage_type(at::ScalarType type, F&& call) {
  if (type == at::kFloat8_e4m3fn) return call(c10::Float8_e4m3fn{});
  if (type == at::kFloat8_e5m2) return call(c10::Float8_e5m2{});
  TORCH_CHECK(is_float_type(type), "kv_cache_write: the cache is ", type,
              "; pass it viewed as float32, bfloat16, float16, float8_e4m3fn or float8_e5m2");
  return with_float_type(type, "kv_cache_write", call);
}

// Writes rows [tokens, kv_heads, width] into a cache [blocks, kv_heads, block_size, width]. The slots are already
// checked.
template <class From, class To, class Convert>
void write_rows(const at::Tensor& rows, const at::Tensor& cache, const Integers& slots, float scale, Convert convert) {
  const From* from = elements<From>(rows);
  To* to = mutable_elements<To>(cache);
  const int64_t heads = rows.size(1), width = rows.size(2), block_size = cache.size(2), spread = cache.stride(3);
  const int64_t row_stride = rows.stride(0), row_head = rows.stride(1);
  const int64_t block_stride = cache.stride(0), head_stride = cache.stride(1), slot_stride = cache.stride(2);
  // If heads are adjacent on both sides, a token is one row.
  const bool joined = row_head == width && head_stride == width && spread == 1;
  at::parallel_for(0, slots.size(), rows_per_thread(heads * width), [&](int64_t begin, int64_t end) {
    std::vector<To> apart(spread == 1 ? 0 : width);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = slots[t];
      if (slot < 0) continue;
      To* target = to + slot / block_size * block_stride + slot % block_size * slot_stride;
      const From* source = from + t * row_stride;
      if (joined) {
        convert(source, heads * width, scale, target);
        continue;
      }
      for (int64_t h = 0; h < heads; ++h) {
        if (spread == 1) {
          convert(source + h * row_head, width, scale, target + h * head_stride);
          continue;
        }
        convert(source + h * row_head, width, scale, apart.data());
        for (int64_t i = 0; i < width; ++i) target[h * head_stride + i * spread] = apart[i];
      }
    }
  });
}

void write_one(const char* which, const at::Tensor& given, const at::Tensor& cache, const Integers& slots,
               double scale) {
  TORCH_CHECK(given.dim() == 3 && cache.dim() == 4 && given.size(1) == cache.size(1) &&
                  given.size(2) == cache.size(3) && given.size(0) >= slots.size(),
              "kv_cache_write: ", which, " of shape ", given.sizes(), " and ", slots.size(),
              " slots do not fit a cache of shape ", cache.sizes());
  const int64_t capacity = cache.size(0) * cache.size(2);
  for (int64_t t = 0; t < slots.size(); ++t)
    TORCH_CHECK(slots[t] < capacity, "kv_cache_write: slot ", slots[t], " is outside the cache, which has ", capacity,
                " slots");
  const at::Tensor rows = given.stride(2) == 1 ? given : given.contiguous();
  with_float_type(rows.scalar_type(), "kv_cache_write", [&](auto from_tag) {
    with_storage_type(cache.scalar_type(), [&](auto to_tag) {
      using From = decltype(from_tag);
      using To = decltype(to_tag);
      if constexpr (std::is_same_v<From, To>) {
        if (scale == 1.0) return write_rows<From, To>(rows, cache, slots, 1.0f, pick<CopyRow<From>>());
      }
      write_rows<From, To>(rows, cache, slots, static_cast<float>(scale), pick<ConvertRow<From, To>>());
    });
  });
}

void kv_cache_write(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
                    const at::Tensor& value_cache, const at::Tensor& slot_mapping, double k_scale, double v_scale) {
  TORCH_CHECK(slot_mapping.dim() == 1, "kv_cache_write: slot_mapping must be a vector, got shape ",
              slot_mapping.sizes());
  if (slot_mapping.size(0) == 0) return;
  const Integers slots(slot_mapping, "kv_cache_write");
  write_one("key", key, key_cache, slots, k_scale);
  write_one("value", value, value_cache, slots, v_scale);
}

void kv_cache_zero_blocks(const at::Tensor& kv_cache, const at::Tensor& block_ids) {
  TORCH_CHECK(kv_cache.dim() >= 1 && block_ids.dim() == 1, "kv_cache_zero_blocks: a cache of shape ", kv_cache.sizes(),
              " and block_ids of shape ", block_ids.sizes(), "; block_ids must be a vector");
  if (block_ids.size(0) == 0) return;
  const Integers ids(block_ids, "kv_cache_zero_blocks");
  const int64_t blocks = kv_cache.size(0);
  for (int64_t i = 0; i < ids.size(); ++i)
    TORCH_CHECK(ids[i] >= -blocks && ids[i] < blocks, "kv_cache_zero_blocks: block ", ids[i],
                " is outside the cache, which has ", blocks, " blocks");
  const at::Tensor bytes = kv_cache.element_size() == 1 ? kv_cache.view(at::kByte) : kv_cache;
  const auto block = [&](int64_t i) { return ids[i] < 0 ? ids[i] + blocks : ids[i]; };
  if (!bytes.select(0, 0).is_non_overlapping_and_dense()) {
    for (int64_t i = 0; i < ids.size(); ++i) bytes.select(0, block(i)).zero_();
    return;
  }
  // In any order of the inner dimensions, a block is one contiguous run of bytes, and zero bytes are zeros.
  auto* data = static_cast<char*>(bytes.mutable_data_ptr());
  const int64_t stride = bytes.stride(0) * bytes.element_size();
  const int64_t size = bytes.numel() / blocks * bytes.element_size();
  at::parallel_for(0, ids.size(), rows_per_thread(size / 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::memset(data + block(i) * stride, 0, size);
  });
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("kv_cache_write", &backplane::cpu::kv_cache_write);
  library.impl("kv_cache_zero_blocks", &backplane::cpu::kv_cache_zero_blocks);
}
