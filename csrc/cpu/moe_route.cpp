// Selects the experts of each token. All arithmetic is float32, because another order of experts would be another
// model.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "rows.h"

namespace backplane::cpu {
namespace {

enum class Scoring { softmax, sigmoid, sqrtsoftplus };

Scoring scoring_of(std::string_view name) {
  if (name == "softmax") return Scoring::softmax;
  if (name == "sigmoid") return Scoring::sigmoid;
  if (name == "sqrtsoftplus") return Scoring::sqrtsoftplus;
  TORCH_CHECK(false, "moe_route: unknown scoring '", name, "'; use softmax, sigmoid or sqrtsoftplus");
}

void score(Scoring scoring, const float* logits, int64_t n, float* scores) {
  if (scoring == Scoring::softmax) {
    float most = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, logits[i]);
    for (int64_t i = 0; i < n; ++i) sum += scores[i] = std::exp(logits[i] - most);
    for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float x = logits[i];
    if (scoring == Scoring::sigmoid) scores[i] = 1.0f / (1.0f + std::exp(-x));
    else scores[i] = std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x)));  // like PyTorch's softplus: linear above 20
  }
}

// Orders by descending value; of equal values the first; NaN first, as PyTorch sorts.
struct Better {
  const float* values;
  bool operator()(int32_t a, int32_t b) const {
    const float x = values[a], y = values[b];
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y) ? a < b : std::isnan(x);
    return x != y ? x > y : a < b;
  }
};

std::vector<int32_t> best_of(const float* values, int64_t n, int64_t count) {
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(), Better{values});
  order.resize(count);
  return order;
}

struct Groups {
  int64_t count, kept;
  bool by_two;  // a group's score is the sum of its two best, else its best
};

void bar_groups(const Groups& groups, float* choice, int64_t n) {
  const int64_t size = n / groups.count;
  std::vector<float> quality(groups.count);
  for (int64_t g = 0; g < groups.count; ++g) {
    const float* of = choice + g * size;
    const std::vector<int32_t> best = best_of(of, size, std::min<int64_t>(groups.by_two ? 2 : 1, size));
    quality[g] = 0;
    for (const int32_t place : best) quality[g] += of[place];
  }
  std::vector<bool> stays(groups.count, false);
  for (const int32_t g : best_of(quality.data(), groups.count, std::min(groups.kept, groups.count))) stays[g] = true;
  for (int64_t i = 0; i < n; ++i)
    if (!stays[i / size]) choice[i] = -std::numeric_limits<float>::infinity();
}

std::tuple<at::Tensor, at::Tensor> moe_route(const at::Tensor& router_logits, int64_t top_k, bool renormalize,
                                             std::string_view scoring_name, const std::optional<at::Tensor>& correction_bias,
                                             int64_t num_expert_group, int64_t topk_group, double routed_scaling_factor) {
  const Scoring scoring = scoring_of(scoring_name);
  TORCH_CHECK(router_logits.dim() == 2 && top_k >= 0 && top_k <= router_logits.size(1), "moe_route: top_k is ", top_k,
              " for router_logits of shape ", router_logits.sizes());
  const int64_t tokens = router_logits.size(0), n = router_logits.size(1);
  at::Tensor weights = at::empty({tokens, top_k}, router_logits.options().dtype(at::kFloat));
  at::Tensor ids = at::empty({tokens, top_k}, router_logits.options().dtype(at::kInt));
  const at::Tensor logits = router_logits.to(at::kFloat).contiguous();
  at::Tensor bias;
  if (correction_bias.has_value() && correction_bias->defined()) {
    bias = correction_bias->to(at::kFloat).contiguous();
    TORCH_CHECK(bias.dim() == 1 && bias.size(0) == n, "moe_route: bias has shape ", bias.sizes(), " for ", n,
                " experts");
  }
  TORCH_CHECK(num_expert_group == 0 || (num_expert_group > 0 && n % num_expert_group == 0), "moe_route: ", n,
              " experts do not divide into ", num_expert_group, " groups");
  const Groups groups{num_expert_group, topk_group, bias.defined()};
  const float* from = logits.const_data_ptr<float>();
  const float* added = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  float* weight = weights.mutable_data_ptr<float>();
  int32_t* id = ids.mutable_data_ptr<int32_t>();
  at::parallel_for(0, tokens, rows_per_thread(8 * n), [&](int64_t begin, int64_t end) {
    std::vector<float> scores(n), choice(n);
    for (int64_t token = begin; token < end; ++token) {
      score(scoring, from + token * n, n, scores.data());
      for (int64_t i = 0; i < n; ++i) choice[i] = added != nullptr ? scores[i] + added[i] : scores[i];
      if (groups.count > 0) bar_groups(groups, choice.data(), n);
      const std::vector<int32_t> best = best_of(choice.data(), n, top_k);
      float sum = 0;
      for (const int32_t expert : best) sum += scores[expert];
      const float scale = static_cast<float>(routed_scaling_factor) / (renormalize ? sum : 1.0f);
      for (int64_t k = 0; k < top_k; ++k) {
        weight[token * top_k + k] = scores[best[k]] * scale;
        id[token * top_k + k] = best[k];
      }
    }
  });
  return {weights, ids};
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) { library.impl("moe_route", &backplane::cpu::moe_route); }
