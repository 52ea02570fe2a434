// Computes the bytes and floating-point operations of launches that access only a part of their arguments.

#include "runtime/launch_detail.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/count_nonzero.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace backplane::sim {
namespace {

using Detail = Plan::Detail;

double count(const at::Tensor& tensor) { return static_cast<double>(tensor.numel()); }
double width(const at::Tensor& tensor) { return static_cast<double>(tensor.itemsize()); }

// Returns the number of elements in one slice of a dimension.
double per_slice(const at::Tensor& tensor, int64_t dim) {
  if (tensor.dim() == 0) return 1;
  const int64_t size = tensor.size(at::maybe_wrap_dim(dim, tensor.dim()));
  return size == 0 ? 0 : count(tensor) / static_cast<double>(size);
}

// Reads integers on the card, as the kernel sees them.
std::vector<int64_t> numbers(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kLong).contiguous();
  const int64_t* const first = wide.const_data_ptr<int64_t>();
  return {first, first + wide.numel()};
}

// --- gathers: a part of the input is read and written elsewhere
// ----------------------------------------------------------

Detail picked(const at::Tensor& from, const at::Tensor& index, double elements) {
  return {2 * elements * width(from) + bytes_in(index), 0, {}};
}

Detail of_index_select(Arguments a) {
  const at::Tensor &self = a[0].toTensor(), &index = a[2].toTensor();
  return picked(self, index, count(index) * per_slice(self, a[1].toInt()));
}

Detail of_gather(Arguments a) { return picked(a[0].toTensor(), a[2].toTensor(), count(a[2].toTensor())); }

Detail of_take(Arguments a) { return picked(a[0].toTensor(), a[1].toTensor(), count(a[1].toTensor())); }

Detail of_index(Arguments a) {
  Detail detail{2 * bytes_in(a[2].toTensor()), 0, {}};
  for (const auto& index : a[1].toOptionalTensorVector())
    if (index.has_value() && index->defined()) detail.bytes += bytes_in(*index);
  return detail;
}

// --- scatters: a part of the output is written
// ----------------------------------------------------------------------------

// `adds`: the old values are read too. An operator whose output is not its input writes the whole output.
Detail placed(Arguments a, double elements, bool adds) {
  const at::Tensor &self = a[0].toTensor(), &index = a[2].toTensor();
  const bool from_tensor = a.size() > 3 && a[3].isTensor();
  const double each = elements * width(self);
  Detail detail{bytes_in(index) + each * (1 + (from_tensor ? 1 : 0) + (adds ? 1 : 0)), 0, {}};
  if (a.back().isTensor() && a.back().toTensor().const_data_ptr() != self.const_data_ptr())
    detail.bytes += bytes_in(self) + bytes_in(a.back().toTensor());
  return detail;
}

Detail of_scatter(Arguments a) { return placed(a, count(a[2].toTensor()), false); }
Detail of_scatter_add(Arguments a) { return placed(a, count(a[2].toTensor()), true); }
Detail of_index_copy(Arguments a) { return placed(a, count(a[3].toTensor()), false); }
Detail of_index_add(Arguments a) { return placed(a, count(a[3].toTensor()), true); }

Detail of_index_fill(Arguments a) {
  const at::Tensor &self = a[0].toTensor(), &index = a[2].toTensor();
  return {bytes_in(index) + count(index) * per_slice(self, a[1].toInt()) * width(self), 0, {}};
}

Detail of_index_put(Arguments a) {
  const at::Tensor &self = a[0].toTensor(), &values = a[2].toTensor();
  Detail detail{bytes_in(values), 0, {}};
  std::vector<int64_t> shape;  // of the broadcast index tensors
  double elements = 1;
  int64_t dim = 0;
  for (const auto& index : a[1].toOptionalTensorVector()) {
    if (!index.has_value() || !index->defined()) {
      elements *= static_cast<double>(self.size(dim++));
      continue;
    }
    detail.bytes += bytes_in(*index);
    const bool mask = index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
    if (mask) shape = at::infer_size(shape, {at::count_nonzero(*index).item<int64_t>()});
    else shape = at::infer_size(shape, index->sizes());
    dim += mask ? index->dim() : 1;
  }
  for (; dim < self.dim(); ++dim) elements *= static_cast<double>(self.size(dim));
  for (const int64_t size : shape) elements *= static_cast<double>(size);
  const bool adds = a[3].toBool();
  detail.bytes += elements * width(self) * (adds ? 2 : 1);
  return detail;
}

// --- the KV cache -------------------------------------------------------------------------------------------------------

// key, value, key_cache, value_cache, slot_mapping
Detail of_kv_cache_write(Arguments a) {
  const at::Tensor &key_cache = a[2].toTensor(), &slots = a[4].toTensor();
  Detail detail{bytes_in(slots), 0, {}};
  int64_t used = 0, first = -1;
  for (const int64_t slot : numbers(slots)) {
    if (slot < 0) continue;
    if (first < 0) first = slot;
    ++used;
  }
  for (int i = 0; i < 2; ++i) {
    const at::Tensor &rows = a[i].toTensor(), &cache = a[i + 2].toTensor();
    detail.bytes += static_cast<double>(used) * per_slice(rows, 0) * (width(rows) + width(cache));
  }
  const int64_t block = key_cache.size(2);
  if (first >= 0 && first / block < key_cache.size(0))  // the first head of the first token
    detail.output = key_cache.select(0, first / block).select(0, 0).select(0, first % block);
  return detail;
}

Detail of_kv_cache_zero_blocks(Arguments a) {
  const at::Tensor &cache = a[0].toTensor(), &ids = a[1].toTensor();
  Detail detail{bytes_in(ids) + count(ids) * per_slice(cache, 0) * width(cache), 0, {}};
  if (ids.numel() != 0) detail.output = cache.select(0, numbers(ids)[0]);
  return detail;
}

// --- attention ----------------------------------------------------------------------------------------------------------

struct AttentionMask {
  bool causal;
  int64_t window;

  int64_t begin(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
  int64_t end(int64_t position, int64_t length) const {
    if (causal) return std::max<int64_t>(0, std::min(length, position + 1));
    return window > 0 ? std::max<int64_t>(0, std::min(length, position + window)) : length;
  }
  // Returns the number of (query, visible key) pairs for the last `rows` positions of `length`.
  double pairs(int64_t rows, int64_t length) const {
    double sum = 0;
    for (int64_t position = length - rows; position < length; ++position)
      sum += static_cast<double>(std::max<int64_t>(0, end(position, length) - begin(position)));
    return sum;
  }
  // Returns the number of keys that any of these queries attends to; a chip reads each of them once.
  double keys(int64_t rows, int64_t length) const {
    return static_cast<double>(std::max<int64_t>(0, end(length - 1, length) - begin(length - rows)));
  }
};

// Scores and weighted sum: a multiplication and an addition each, per element of a head.
double flops_of_attention(const at::Tensor& query, int64_t value_head, double pairs) {
  return 2.0 * pairs * static_cast<double>(query.size(1)) * static_cast<double>(query.size(2) + value_head);
}

// query, key_cache, value_cache, block_table, query_start_loc, seq_lens, scale, causal, sliding_window, …, out
Detail of_paged_attention(Arguments a) {
  const at::Tensor &query = a[0].toTensor(), &keys = a[1].toTensor(), &values = a[2].toTensor();
  const at::Tensor &table = a[3].toTensor(), &out = a.back().toTensor();
  const AttentionMask mask{a[7].toBool(), a[8].toInt()};
  const std::vector<int64_t> starts = numbers(a[4].toTensor()), lengths = numbers(a[5].toTensor());
  double pairs = 0, read = 0, blocks = 0, tokens = 0;
  for (size_t i = 0; i < lengths.size() && i + 1 < starts.size(); ++i) {
    const int64_t rows = starts[i + 1] - starts[i];
    if (rows <= 0) continue;
    const double seen = mask.keys(rows, lengths[i]);
    tokens += static_cast<double>(rows);
    pairs += mask.pairs(rows, lengths[i]);
    read += seen;
    blocks += std::ceil(seen / static_cast<double>(keys.size(2)));
  }
  Detail detail;
  const double heads = static_cast<double>(keys.size(1));
  const double per_head = static_cast<double>(keys.size(3)) * width(keys) +
                          static_cast<double>(values.size(3)) * width(values);
  detail.bytes = read * heads * per_head +
                 tokens * (per_slice(query, 0) * width(query) + per_slice(out, 0) * width(out)) + blocks * width(table) +
                 bytes_in(a[4].toTensor()) + bytes_in(a[5].toTensor());
  detail.flops = flops_of_attention(query, values.size(3), pairs);
  return detail;
}

// query, key, value, query_start_loc, scale, causal, sliding_window, …, out
Detail of_varlen_attention(Arguments a) {
  const at::Tensor& query = a[0].toTensor();
  const AttentionMask mask{a[5].toBool(), a[6].toInt()};
  const std::vector<int64_t> starts = numbers(a[3].toTensor());
  double pairs = 0;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    const int64_t rows = starts[i + 1] - starts[i];
    pairs += mask.pairs(rows, rows);
  }
  Detail detail;
  for (const size_t i : {size_t{0}, size_t{1}, size_t{2}, size_t{3}, a.size() - 1})
    detail.bytes += bytes_in(a[i].toTensor());
  detail.flops = flops_of_attention(query, a[2].toTensor().size(2), pairs);
  return detail;
}

// --- tables of rows by position -----------------------------------------------------------------------------------------

// positions, query, key?, cos_sin_cache
Detail of_rotary_embedding(Arguments a) {
  const at::Tensor &positions = a[0].toTensor(), &table = a[3].toTensor();
  Detail detail{bytes_in(positions) + 2 * bytes_in(a[1].toTensor()), 0, {}};
  if (a[2].isTensor() && a[2].toTensor().defined()) detail.bytes += 2 * bytes_in(a[2].toTensor());
  detail.bytes += count(positions) * per_slice(table, 0) * width(table);
  return detail;
}

// query_start_loc, positions, block_table, slot_mapping: one entry of the table per token
Detail of_compute_slot_mapping(Arguments a) {
  const std::vector<int64_t> starts = numbers(a[0].toTensor());
  const double tokens = starts.empty() ? 0 : static_cast<double>(starts.back());
  return {bytes_in(a[0].toTensor()) + tokens * (width(a[1].toTensor()) + width(a[2].toTensor())) +
              bytes_in(a[3].toTensor()),
          0,
          {}};
}

struct KnownDetails {
  const char* name;
  Plan::Details details;
};

constexpr KnownDetails kKnownDetails[] = {
    {"aten::index_select", &of_index_select},
    {"aten::index_select.out", &of_index_select},
    {"aten::gather.out", &of_gather},
    {"aten::take", &of_take},
    {"aten::take.out", &of_take},
    {"aten::index.Tensor_out", &of_index},
    {"aten::scatter.src_out", &of_scatter},
    {"aten::scatter.value_out", &of_scatter},
    {"aten::scatter.reduce_out", &of_scatter_add},
    {"aten::scatter.value_reduce_out", &of_scatter_add},
    {"aten::scatter_add.out", &of_scatter_add},
    {"aten::scatter_reduce.two_out", &of_scatter_add},
    {"aten::index_copy.out", &of_index_copy},
    {"aten::index_add.out", &of_index_add},
    {"aten::index_reduce.out", &of_index_add},
    {"aten::index_fill_.int_Scalar", &of_index_fill},
    {"aten::index_fill_.int_Tensor", &of_index_fill},
    {"aten::_index_put_impl_", &of_index_put},
    {"backplane::kv_cache_write", &of_kv_cache_write},
    {"backplane::kv_cache_zero_blocks", &of_kv_cache_zero_blocks},
    {"backplane::paged_attention", &of_paged_attention},
    {"backplane::varlen_attention", &of_varlen_attention},
    {"backplane::rotary_embedding", &of_rotary_embedding},
    {"backplane::compute_slot_mapping", &of_compute_slot_mapping},
};

}  // namespace

double bytes_in(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const size_t span = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  return std::min(static_cast<double>(span), count(tensor) * width(tensor));
}

Plan::Details details_of(const std::string& name) {
  for (const KnownDetails& known : kKnownDetails)
    if (name == known.name) return known.details;
  return nullptr;
}

}  // namespace backplane::sim
