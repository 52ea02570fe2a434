// Detects which types the processor's matrix instructions support, limited to the instructions that PyTorch itself
// uses.

#include <c10/core/ScalarType.h>

#include <cctype>
#include <cstdlib>
#include <initializer_list>
#include <string>
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace backplane::cpu {
namespace {

// Returns whether oneDNN may use the instructions. Environment variables can restrict oneDNN, and PyTorch then does
// without the instructions too. oneDNN's names are ordered: FP16 implies BF16; AMX and AVX10 imply both.
[[maybe_unused]] bool allowed_by_onednn(std::initializer_list<const char*> names) {
  const char* stated = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (stated == nullptr) stated = std::getenv("DNNL_MAX_CPU_ISA");
  if (stated == nullptr) return true;
  std::string limit(stated);
  for (char& letter : limit) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  for (const char* name : names)
    if (limit.find(name) != std::string::npos) return true;
  return limit == "ALL" || limit == "DEFAULT";
}

bool has_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") && allowed_by_onednn({"BF16", "FP16", "AMX", "AVX10"});
#elif defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP2) & (1UL << 14)) != 0;  // HWCAP2_BF16
#else
  return false;
#endif
}

// Returns whether AMX tiles of bfloat16 can be used: the processor has them, the system saves their state, and this
// process has permission. Linux grants the permission only on request.
bool has_tiles() {
#if defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
  unsigned a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (!has_bfloat16() || !allowed_by_onednn({"AMX"})) return false;
  if ((d & (1U << 22)) == 0 || (d & (1U << 24)) == 0) return false;  // bfloat16, tiles
  unsigned saved, upper;
  __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  constexpr unsigned kTileState = (1U << 17) | (1U << 18);
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return (saved & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_float16() {
#if defined(__x86_64__)
  // AVX512-FP16 is leaf 7, edx bit 23. Some compilers' __builtin_cpu_supports does not accept its name.
  unsigned a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (d & (1U << 23)) != 0 && allowed_by_onednn({"FP16", "AMX", "AVX10"});
#else
  return false;  // PyTorch's float16 GEMM on aarch64 reaches a fraction of the memory bandwidth (measured)
#endif
}

}  // namespace

bool has_fast_matmul(at::ScalarType type) {
  static const bool bfloat = has_bfloat16();
  static const bool half = has_float16();
  return type == at::ScalarType::BFloat16 ? bfloat : half;
}

bool has_bfloat16_tiles() {
  static const bool tiles = has_tiles();
  return tiles;
}

}  // namespace backplane::cpu

extern "C" __attribute__((visibility("default"))) int backplane_cpu_has_tiles() {
  return backplane::cpu::has_bfloat16_tiles();
}
