// Applies a grammar's bit mask, one bit per token, to the logits.
//
// Grammars forbid nearly all tokens or nearly none, so 32 tokens with equal bits are handled at once.

#include <torch/library.h>

#include <limits>

#include "rows.h"

namespace backplane::cpu {
namespace {

constexpr int64_t kBits = 32;

void allowed_tokens_mask(const at::Tensor& logits, const at::Tensor& allowed) {
  const char* name = "allowed_tokens_mask";
  TORCH_CHECK(logits.dim() == 2 && allowed.dim() == 2 && allowed.scalar_type() == at::kInt &&
                  allowed.size(0) == logits.size(0),
              name, ": the mask is ", allowed.scalar_type(), " ", allowed.sizes(), " for logits of shape ",
              logits.sizes(), "; it must be int32 [batch, words]");
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), stride = logits.stride(1);
  const int64_t words = std::min(allowed.size(1), (vocabulary + kBits - 1) / kBits);
  const int32_t* masks = elements<int32_t>(allowed);
  with_float_type(logits.scalar_type(), name, [&](auto tag) {
    using T = decltype(tag);
    const T none(-std::numeric_limits<float>::infinity());
    T* data = mutable_elements<T>(logits);
    at::parallel_for(0, rows, rows_per_thread(vocabulary), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* row = data + r * logits.stride(0);
        for (int64_t w = 0; w < words; ++w) {
          const auto bits = static_cast<uint32_t>(masks[r * allowed.stride(0) + w * allowed.stride(1)]);
          if (bits == ~uint32_t{0}) continue;
          T* first = row + w * kBits * stride;
          const int64_t count = std::min(kBits, vocabulary - w * kBits);
          if (bits == 0 && stride == 1) {
            std::fill_n(first, count, none);
            continue;
          }
          for (int64_t i = 0; i < count; ++i)
            if ((bits >> i & 1) == 0) first[i * stride] = none;
        }
      }
    });
  });
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) { library.impl("allowed_tokens_mask", &backplane::cpu::allowed_tokens_mask); }
