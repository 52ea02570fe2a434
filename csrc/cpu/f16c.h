// Whether the processor converts between half and single precision. All that have AVX2 were made with it, but it is a
// feature of its own, which a hypervisor may hide. Of use after a question for AVX2, which asks for the system too.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace backplane::cpu {

// Leaf 1, ecx bit 29; not every compiler's cpu_supports knows the name.
inline bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
}

// What everything for AVX2 is compiled for.
inline bool has_avx2_and_conversions() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

}  // namespace backplane::cpu
#endif
