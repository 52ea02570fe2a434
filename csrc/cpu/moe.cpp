// Computes mixture-of-experts layers.
//
// Tokens are grouped by expert, so that the weights of an expert are read once for all its tokens. Each expert is then
// two GEMMs, like any other linear layer.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <string_view>
#include <vector>

#include "activations.h"
#include "rows.h"

namespace backplane::cpu {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);  // widening_linear.cpp

namespace {

// One expert of one token.
struct Pair {
  int64_t token;
  float scale;
};

struct ByExpert {
  std::vector<Pair> pairs;       // grouped by expert, in order
  std::vector<int64_t> begins;   // the first pair of each expert, and the end
};

// Maps an expert id to the index of its local weights; -1 for an expert of another rank.
class Places {
 public:
  Places(const std::optional<at::Tensor>& map, int64_t experts) : experts_(experts) {
    if (!map.has_value() || !map->defined()) return;
    map_ = map->to(at::kLong).contiguous();
    TORCH_CHECK(map_.dim() == 1, "moe_experts: the expert map must be a vector, got shape ", map_.sizes());
  }

  int64_t of(int64_t id) const {
    if (id >= 0 && map_.defined()) {
      TORCH_CHECK(id < map_.size(0), "moe_experts: expert ", id, " is outside the expert map, which has ", map_.size(0),
                  " entries");
      id = map_.const_data_ptr<int64_t>()[id];
    }
    return id >= 0 && id < experts_ ? id : -1;
  }

 private:
  at::Tensor map_;
  int64_t experts_;
};

ByExpert brought_together(const at::Tensor& ids, const at::Tensor& scales, const Places& places, int64_t experts) {
  const int64_t count = ids.numel(), top_k = ids.size(1);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const float* scale = scales.const_data_ptr<float>();
  std::vector<int64_t> place(count);
  ByExpert found;
  found.begins.assign(experts + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    place[i] = places.of(id[i]);
    if (place[i] >= 0) ++found.begins[place[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) found.begins[e + 1] += found.begins[e];
  found.pairs.resize(found.begins[experts]);
  std::vector<int64_t> next(found.begins.begin(), found.begins.end() - 1);
  for (int64_t i = 0; i < count; ++i)
    if (place[i] >= 0) found.pairs[next[place[i]]++] = {i / top_k, scale[i]};
  return found;
}

template <class T>
at::Tensor rows_of_tokens(const at::Tensor& x, const Pair* pairs, int64_t count, bool scaled) {
  const int64_t width = x.size(1);
  at::Tensor rows = at::empty({count, width}, x.options());
  const T* from = elements<T>(x);
  T* to = mutable_elements<T>(rows);
  at::parallel_for(0, count, rows_per_thread(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = from + pairs[r].token * width;
      if (!scaled) {
        std::memcpy(to + r * width, row, width * sizeof(T));
        continue;
      }
      for (int64_t i = 0; i < width; ++i) to[r * width + i] = static_cast<T>(static_cast<float>(row[i]) * pairs[r].scale);
    }
  });
  return rows;
}

// A token may have an expert twice, so threads divide the columns and not the rows.
template <class T>
void add(const at::Tensor& outputs, const Pair* pairs, bool scaled, float* total) {
  const int64_t count = outputs.size(0), width = outputs.size(1);
  const T* from = elements<T>(outputs);
  at::parallel_for(0, width, rows_per_thread(count), [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < count; ++r) {
      const T* row = from + r * width;
      float* sum = total + pairs[r].token * width;
      const float scale = scaled ? pairs[r].scale : 1.0f;
      for (int64_t i = begin; i < end; ++i) sum[i] += scale * static_cast<float>(row[i]);
    }
  });
}

std::optional<at::Tensor> of_expert(const std::optional<at::Tensor>& all, int64_t expert) {
  if (!all.has_value() || !all->defined()) return std::nullopt;
  return all->select(0, expert);
}

at::Tensor moe_experts(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& w2, const at::Tensor& topk_weights,
                       const at::Tensor& topk_ids, std::string_view activation, const std::optional<at::Tensor>& w13_bias,
                       const std::optional<at::Tensor>& w2_bias, const std::optional<at::Tensor>& expert_map,
                       bool apply_router_weight_on_input, double alpha, std::optional<double> limit, double beta) {
  TORCH_CHECK(x.dim() == 2 && w13.dim() == 3 && w2.dim() == 3 && w13.size(0) == w2.size(0) && w13.size(2) == x.size(1),
              "moe_experts: input of shape ", x.sizes(), " does not fit experts of shapes ", w13.sizes(), " and ",
              w2.sizes());
  TORCH_CHECK(topk_ids.dim() == 2 && topk_ids.sizes() == topk_weights.sizes() && topk_ids.size(0) == x.size(0),
              "moe_experts: topk_ids of shape ", topk_ids.sizes(), " and topk_weights of shape ", topk_weights.sizes(),
              " do not fit input of shape ", x.sizes());
  const int64_t experts = w13.size(0), tokens = x.size(0), width = w2.size(1);
  at::Tensor out = at::empty({tokens, width}, x.options());  // first, so that a graph replay finds its address
  const bool narrow = x.scalar_type() != at::kFloat;
  at::Tensor total = narrow ? at::empty({tokens, width}, x.options().dtype(at::kFloat)) : out;
  total.zero_();
  const at::Tensor input = x.contiguous();
  const ByExpert found = brought_together(topk_ids.to(at::kLong).contiguous(), topk_weights.to(at::kFloat).contiguous(),
                                          Places(expert_map, experts), experts);
  with_float_type(x.scalar_type(), "moe_experts", [&](auto type) {
    using T = decltype(type);
    for (int64_t expert = 0; expert < experts; ++expert) {
      const int64_t begin = found.begins[expert], count = found.begins[expert + 1] - begin;
      if (count == 0) continue;
      const Pair* pairs = found.pairs.data() + begin;
      const at::Tensor rows = rows_of_tokens<T>(input, pairs, count, apply_router_weight_on_input);
      const at::Tensor inner = activate_experts(
          activation, linear(rows, w13.select(0, expert), of_expert(w13_bias, expert)), alpha, limit, beta);
      const at::Tensor outputs = linear(inner, w2.select(0, expert), of_expert(w2_bias, expert)).contiguous();
      add<T>(outputs, pairs, !apply_router_weight_on_input, total.mutable_data_ptr<float>());
    }
  });
  if (narrow) out.copy_(total);
  return out;
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) { library.impl("moe_experts", &backplane::cpu::moe_experts); }
