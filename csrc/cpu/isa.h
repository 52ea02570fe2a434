// Which instruction set a kernel is compiled for, chosen at run time from one build.
//
// A kernel is a struct with a static member template `run<W>`, always inlined, W being the number of floats in a
// vector. `pick<Kernel>()` gives a pointer to the variant for this machine. A lambda does not inherit the target of the
// function it is written in, so what runs inside at::parallel_for must go through such a pointer.
#pragma once

#include "simd.h"

namespace backplane::cpu {

enum class Isa : int { base = 0, avx2 = 1, avx512 = 2 };

// The best the machine has, unless a test has lowered it.
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
