// What the processor's matrix instructions take, as PyTorch itself would use them.

#include <c10/core/ScalarType.h>

#include <cstdlib>
#include <cstring>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace backplane::cpu {
namespace {

// oneDNN can be told to leave instructions out; then PyTorch does not have them either.
bool allowed_by_onednn() {
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  return limit == nullptr || std::strcmp(limit, "ALL") == 0 || std::strcmp(limit, "DEFAULT") == 0 ||
         std::strstr(limit, "AMX") != nullptr || std::strstr(limit, "BF16") != nullptr;
}

bool has_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") && allowed_by_onednn();
#elif defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP2) & (1UL << 14)) != 0;  // HWCAP2_BF16
#else
  return false;
#endif
}

bool has_float16() {
#if defined(__x86_64__)
  // AVX512-FP16: leaf 7, edx bit 23; not every compiler's cpu_supports knows the name.
  unsigned a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (d & (1U << 23)) != 0 && allowed_by_onednn();
#else
  return false;  // PyTorch's float16 product on aarch64 measures at a fraction of the bandwidth
#endif
}

}  // namespace

bool has_fast_matmul(at::ScalarType type) {
  static const bool bfloat = has_bfloat16();
  static const bool half = has_float16();
  return type == at::ScalarType::BFloat16 ? bfloat : half;
}

}  // namespace backplane::cpu
