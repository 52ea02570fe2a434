// Compares the speed of the kernels' arithmetic in a portable SIMD library, Highway, with the compiler's vector types
// (simd.h).
//
//   apt-get install libhwy-dev
//   torch=$(python -c "import torch, pathlib; print(pathlib.Path(torch.__file__).parent / 'include')")
//   g++ -std=c++20 -O3 -march=native -I csrc/cpu -isystem $torch benchmarks/portable_simd.cpp -o /tmp/portable_simd && /tmp/portable_simd
//
// It uses vectors of the architecture's base (four floats), one thread, and operands in the L1 cache.

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

#include "vector_math.h"

namespace {

namespace hn = hwy::HWY_NAMESPACE;
using backplane::cpu::Floats;
constexpr int kWidth = 4;
const hn::FixedTag<float, kWidth> kTag;
constexpr int64_t kCount = 1536;

void ours_exponential(const float* x, const float*, float* to) {
  namespace cpu = backplane::cpu;
  for (int64_t i = 0; i < kCount; i += kWidth)
    cpu::store<kWidth>(to + i, cpu::exponential<kWidth>(cpu::load<kWidth>(x + i)));
}
void highway_exponential(const float* x, const float*, float* to) {
  for (int64_t i = 0; i < kCount; i += kWidth) hn::StoreU(hn::Exp(kTag, hn::LoadU(kTag, x + i)), kTag, to + i);
}

void ours_gate(const float* x, const float* up, float* to) {
  namespace cpu = backplane::cpu;
  for (int64_t i = 0; i < kCount; i += kWidth) {
    const Floats<kWidth> gate = cpu::load<kWidth>(x + i);
    cpu::store<kWidth>(to + i, gate * cpu::logistic<kWidth>(gate) * cpu::load<kWidth>(up + i));
  }
}
void highway_gate(const float* x, const float* up, float* to) {
  const auto one = hn::Set(kTag, 1.0f);
  for (int64_t i = 0; i < kCount; i += kWidth) {
    const auto gate = hn::LoadU(kTag, x + i);
    const auto logistic = hn::Div(one, hn::Add(one, hn::Exp(kTag, hn::Neg(gate))));
    hn::StoreU(hn::Mul(hn::Mul(gate, logistic), hn::LoadU(kTag, up + i)), kTag, to + i);
  }
}

void ours_squares(const float* x, const float*, float* to) {
  namespace cpu = backplane::cpu;
  Floats<kWidth> sums[2] = {};
  for (int64_t i = 0; i < kCount; i += 2 * kWidth) {
    const auto a = cpu::load<kWidth>(x + i), b = cpu::load<kWidth>(x + i + kWidth);
    sums[0] += a * a;
    sums[1] += b * b;
  }
  *to = cpu::sum<kWidth>(sums[0] + sums[1]);
}
void highway_squares(const float* x, const float*, float* to) {
  auto first = hn::Zero(kTag), second = hn::Zero(kTag);
  for (int64_t i = 0; i < kCount; i += 2 * kWidth) {
    const auto a = hn::LoadU(kTag, x + i), b = hn::LoadU(kTag, x + i + kWidth);
    first = hn::MulAdd(a, a, first);
    second = hn::MulAdd(b, b, second);
  }
  *to = hn::GetLane(hn::SumOfLanes(kTag, hn::Add(first, second)));
}

using Function = void (*)(const float*, const float*, float*);

double nanoseconds(Function function, const float* x, const float* up, float* to) {
  double best = 1e30;
  for (int round = 0; round < 30; ++round) {
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) {
      function(x, up, to);
      __asm__ volatile("" ::: "memory");  // what was written counts as read
    }
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  return best * 1e9 / 1000 / kCount;
}

}  // namespace

int main() {
  std::vector<float> x(kCount), up(kCount), to(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    x[i] = static_cast<float>(i) / 64 - 12;
    up[i] = 1.0f + static_cast<float>(i % 7);
  }
  const struct {
    const char* name;
    Function ours, highway;
  } cases[] = {{"exponential", ours_exponential, highway_exponential},
               {"x * logistic(x) * y", ours_gate, highway_gate},
               {"sum of squares", ours_squares, highway_squares}};
  std::printf("%-22s %10s %10s   ns per number, best of 30\n", "", "ours", "Highway");
  for (const auto& one : cases)
    std::printf("%-22s %10.3f %10.3f\n", one.name, nanoseconds(one.ours, x.data(), up.data(), to.data()),
                nanoseconds(one.highway, x.data(), up.data(), to.data()));
  for (const bool ours : {true, false}) {
    (ours ? ours_exponential : highway_exponential)(x.data(), up.data(), to.data());
    double worst = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      const double exact = std::exp(static_cast<double>(x[i]));
      worst = std::max(worst, std::abs(to[i] - exact) / exact);
    }
    std::printf("largest relative error of the exponential, %s: %.2g\n", ours ? "ours" : "Highway", worst);
  }
}
