// Draws random tokens: takes the arg-max of probabilities divided by exponential noise, without storing the quotients.

#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/reciprocal.h>
#include <torch/library.h>

#include "arg_max.h"

namespace backplane::cpu {
namespace {

struct Divide {
  template <int W>
  static BACKPLANE_INLINE void run(const float* probs, const float* noise, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store<W>(to + i, load<W>(probs + i) / load<W>(noise + i));
    for (; i < n; ++i) to[i] = probs[i] / noise[i];
  }
};

at::Tensor sample_by_race(const at::Tensor& probs, const at::Tensor& noise) {
  const char* name = "sample_by_race";
  TORCH_CHECK(probs.dim() == 2 && probs.size(1) > 0 && probs.sizes() == noise.sizes(), name, ": probs has shape ",
              probs.sizes(), " and noise has shape ", noise.sizes(), "; both must be [batch, vocabulary]");
  TORCH_CHECK(probs.scalar_type() == at::kFloat, name, ": probs must be float32, got ", probs.scalar_type());
  // float64 noise is an option that trades speed for precision; the formula of the reference serves it.
  if (noise.scalar_type() != at::kFloat) return at::mul(at::reciprocal(noise), probs).argmax(-1);
  const at::Tensor shares = probs.stride(1) == 1 ? probs : probs.contiguous();
  const at::Tensor waits = noise.stride(1) == 1 ? noise : noise.contiguous();
  at::Tensor out = at::empty({probs.size(0)}, probs.options().dtype(at::kLong));
  const float *share = elements<float>(shares), *wait = elements<float>(waits);
  const int64_t share_stride = shares.stride(0), wait_stride = waits.stride(0);
  const auto divide = pick<Divide>();
  const auto search = pick<ArgMax<float>>();
  first_of_largest(probs.size(0), probs.size(1), out.mutable_data_ptr<int64_t>(),
                   [&](int64_t row, int64_t start, int64_t count) {
                     float quotients[kStretch];
                     Best best;
                     for (int64_t done = 0; done < count; done += kStretch) {
                       const int64_t part = std::min(kStretch, count - done), from = start + done;
                       divide(share + row * share_stride + from, wait + row * wait_stride + from, part, quotients);
                       Best next;
                       search(quotients, part, &next);
                       next.index += done;
                       if (done == 0) best = next;
                       else best.merge(next);
                     }
                     return best;
                   });
  return out;
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) { library.impl("sample_by_race", &backplane::cpu::sample_by_race); }
