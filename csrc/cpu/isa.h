// Chooses at run time, from one build, the variant of a kernel for the machine's instruction set.
//
// A kernel is a struct with a static member template `run<W>`, always inlined, where W is the number of floats in a
// vector. `pick<Kernel>()` returns a pointer to the variant for this machine. A lambda does not inherit the target
// attribute of the function that contains it, so code that runs inside at::parallel_for must be called through such a
// pointer.
#pragma once

#include "simd.h"

namespace backplane::cpu {

enum class Isa : int { base = 0, avx2 = 1, avx512 = 2 };

// Returns the best instruction set of the machine, or a lower one if a test has forced it (backplane_cpu_force_isa).
Isa isa();

template <class Kernel, class Result, class... Args>
Result on_base(Args... args) {
  return Kernel::template run<4>(args...);
}

#if defined(__x86_64__)
template <class Kernel, class Result, class... Args>
__attribute__((target("avx2,fma,f16c"))) Result on_avx2(Args... args) {
  return Kernel::template run<8>(args...);
}

template <class Kernel, class Result, class... Args>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c"))) Result on_avx512(Args... args) {
  return Kernel::template run<16>(args...);
}
#endif

template <class Kernel, class Result, class... Args>
auto pick_like(Result (*)(Args...)) -> Result (*)(Args...) {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return &on_avx512<Kernel, Result, Args...>;
  if (isa() == Isa::avx2) return &on_avx2<Kernel, Result, Args...>;
#endif
  return &on_base<Kernel, Result, Args...>;
}

template <class Kernel>
auto pick() {
  return pick_like<Kernel>(static_cast<decltype(&Kernel::template run<4>)>(nullptr));
}

}  // namespace backplane::cpu
