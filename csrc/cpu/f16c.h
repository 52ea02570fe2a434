// Detects the conversion instructions between half and single precision (F16C).
//
// All processors with AVX2 have them, but they are a separate feature bit, which a hypervisor may hide. The check is
// valid together with the one for AVX2, which also checks that the operating system saves the registers.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace backplane::cpu {

// Leaf 1, ecx bit 29. Some compilers' __builtin_cpu_supports does not accept its name.
inline bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 29)) != 0;
}

// Returns whether the processor has everything that AVX2 variants are compiled for.
inline bool has_avx2_and_conversions() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

}  // namespace backplane::cpu
#endif
