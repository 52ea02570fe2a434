// The machine's instruction set, and the hook by which tests run the variants for lesser ones.

#include "isa.h"

#include <atomic>

#include "f16c.h"

namespace backplane::cpu {
namespace {

Isa best() {
#if defined(__x86_64__)
  if (!has_avx2_and_conversions()) return Isa::base;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return Isa::avx512;
  return Isa::avx2;
#else
  return Isa::base;
#endif
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> value{best()};
  return value;
}

}  // namespace

Isa isa() { return chosen().load(std::memory_order_relaxed); }

}  // namespace backplane::cpu

// For tests, before the first operator: 0 is the base of the architecture, 1 AVX2, 2 AVX-512. Returns the level now in
// use, or -1, with nothing changed, for a level that does not exist or that the machine does not have.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_force_isa(int level) {
  using namespace backplane::cpu;
  if (level < 0 || level > static_cast<int>(best())) return -1;
  chosen().store(static_cast<Isa>(level));
  return level;
}
