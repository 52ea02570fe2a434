// Detects the machine's instruction set, and lets tests force a lower one.

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

// Forces an instruction set, for tests, before the first operator runs: 0 is the base of the architecture, 1 AVX2, 2
// AVX-512. Returns the level that is now in use. Returns -1 and changes nothing if the level does not exist or the
// machine lacks it.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_force_isa(int level) {
  using namespace backplane::cpu;
  if (level < 0 || level > static_cast<int>(best())) return -1;
  chosen().store(static_cast<Isa>(level));
  return level;
}
