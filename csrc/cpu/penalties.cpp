// Applies repetition, frequency and presence penalties. Only tokens that occurred are visited: at most a few thousand
// of the vocabulary.

#include <torch/library.h>

#include <vector>

#include "rows.h"

namespace backplane::cpu {
namespace {

// Counts how often each token was generated. The table is as large as the vocabulary, and take() resets only what was
// counted.
class Occurrences {
 public:
  explicit Occurrences(int64_t vocabulary) : written_(vocabulary, kUnseen) {}

  // Ids outside the vocabulary are padding.
  void count(const Integers& ids, int64_t row, bool are_written) {
    for (int64_t i = 0; i < ids.size(); ++i) {
      const int64_t id = ids.at(row, i);
      if (id < 0 || id >= static_cast<int64_t>(written_.size())) continue;
      if (written_[id] == kUnseen) {
        written_[id] = 0;
        seen_.push_back(id);
      }
      written_[id] += are_written ? 1 : 0;
    }
  }

  // Calls `call` with each token once, and how often it was generated.
  template <class F>
  void take(F&& call) {
    for (const int64_t id : seen_) {
      call(id, written_[id]);
      written_[id] = kUnseen;
    }
    seen_.clear();
  }

 private:
  static constexpr int32_t kUnseen = -1;
  std::vector<int32_t> written_;
  std::vector<int64_t> seen_;
};

struct Penalties {
  float presence, frequency, repetition;

  // The compiler must not fuse the products with the subtractions that follow: a logit must match the operator's
  // reference to the last bit.
  float of(float logit, int32_t written) const {
    const volatile float scaled = logit * (logit > 0.0f ? 1.0f / repetition : repetition);
    const volatile float often = frequency * static_cast<float>(written);
    const float left = scaled - often;
    return written > 0 ? left - presence : left;
  }
};

void apply_penalties(const at::Tensor& logits, const at::Tensor& prompt_ids, const at::Tensor& output_ids,
                     const at::Tensor& presence, const at::Tensor& frequency, const at::Tensor& repetition) {
  const char* name = "apply_penalties";
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat, name, ": logits must be float32 [batch, "
              "vocabulary], got ", logits.scalar_type(), " ", logits.sizes());
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  for (const at::Tensor* ids : {&prompt_ids, &output_ids})
    TORCH_CHECK(ids->dim() == 2 && ids->size(0) == rows, name, ": token ids have shape ", ids->sizes(), " for ", rows,
                " rows");
  for (const at::Tensor* penalty : {&presence, &frequency, &repetition})
    TORCH_CHECK(penalty->dim() == 1 && penalty->size(0) == rows, name, ": a penalty has shape ", penalty->sizes(),
                " for ", rows, " rows");
  const Integers prompt(prompt_ids, name), output(output_ids, name);
  if (rows == 0 || vocabulary == 0) return;
  const at::Tensor present = presence.to(at::kFloat).contiguous(), frequent = frequency.to(at::kFloat).contiguous(),
                   repeated = repetition.to(at::kFloat).contiguous();
  const float *once = elements<float>(present), *often = elements<float>(frequent), *again = elements<float>(repeated);
  float* data = mutable_elements<float>(logits);
  const int64_t row_stride = logits.stride(0), stride = logits.stride(1);
  const int64_t looked_at = prompt.size() + output.size() + vocabulary / 8;
  at::parallel_for(0, rows, rows_per_thread(looked_at), [&](int64_t begin, int64_t end) {
    Occurrences tokens(vocabulary);
    for (int64_t r = begin; r < end; ++r) {
      const Penalties penalties{once[r], often[r], again[r]};
      tokens.count(prompt, r, false);
      tokens.count(output, r, true);
      tokens.take([&](int64_t id, int32_t written) {
        float& logit = data[r * row_stride + id * stride];
        logit = penalties.of(logit, written);
      });
    }
  });
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) { library.impl("apply_penalties", &backplane::cpu::apply_penalties); }
