// Selects the set of dot kernels that the machine runs, and lets tests force another one.

#include "dot_kernels.h"

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "isa.h"

namespace backplane::cpu {
namespace {

struct Choice {
  const DotKernels* kernels;
  Isa least;  // a forced isa() below this level excludes the set
};

// The sets that the machine supports, the best first.
const std::vector<Choice>& choices() {
  static const std::vector<Choice> found = [] {
    const std::vector<Choice> known = {
#if defined(__x86_64__)
        {&amx_dots(), Isa::avx512},       {&kAvx512VnniDots, Isa::avx512}, {&kAvxVnniDots, Isa::avx2},
        {&kAvx2Dots, Isa::avx2},
#elif defined(__aarch64__)
        {&i8mm_dots(), Isa::base},        {&kDotprodDots, Isa::base},      {&kNeonDots, Isa::base},
#endif
        {&kPortableDots, Isa::base},
    };
    std::vector<Choice> result;
    for (const Choice& choice : known)
      if (choice.kernels->available()) result.push_back(choice);
    return result;
  }();
  return found;
}

std::atomic<const DotKernels*> forced{nullptr};

}  // namespace

const DotKernels& dot_kernels() {
  if (const DotKernels* asked = forced.load(std::memory_order_relaxed)) return *asked;
  const Isa most = isa();
  for (const Choice& choice : choices())
    if (choice.least <= most) return *choice.kernels;
  return kPortableDots;
}

}  // namespace backplane::cpu

// Returns the number of output features in a block for this machine's dot kernels.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_quantized_width() {
  return static_cast<int>(backplane::cpu::dot_kernels().width);
}

// Returns whether they take 8-bit codes minus 128, as int8.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_quantized_signed() {
  return backplane::cpu::dot_kernels().signed8 ? 1 : 0;
}

// Returns the number of input rows from which weights are decoded to bfloat16 and the input is rounded to it; 0: never.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_decoded_from(int bits) {
  return static_cast<int>(backplane::cpu::dot_kernels().decoded_from(bits));
}

// Returns the name of the set of dot kernels in use.
extern "C" __attribute__((visibility("default"))) const char* backplane_cpu_dot_products() {
  return backplane::cpu::dot_kernels().name;
}

// Returns the names of the sets that the machine supports, the best first, separated by commas.
extern "C" __attribute__((visibility("default"))) const char* backplane_cpu_known_dot_products() {
  static const std::string names = [] {
    std::string result;
    for (const auto& choice : backplane::cpu::choices()) {
      if (!result.empty()) result += ',';
      result += choice.kernels->name;
    }
    return result;
  }();
  return names.c_str();
}

// Forces the set of that name from now on; an empty name selects the best again. Returns -1 and changes nothing if the
// set does not exist or the machine does not support it.
extern "C" __attribute__((visibility("default"))) int backplane_cpu_force_dot_products(const char* name) {
  using namespace backplane::cpu;
  if (*name == '\0') {
    forced.store(nullptr);
    return 0;
  }
  for (const Choice& choice : choices())
    if (std::strcmp(choice.kernels->name, name) == 0) {
      forced.store(choice.kernels);
      return 0;
    }
  return -1;
}
