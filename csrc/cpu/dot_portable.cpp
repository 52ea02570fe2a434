// Implements the dot kernels in plain C++, for processors without any of the instructions that the other sets need.

#define BACKPLANE_TARGET
#include "dot_products.h"

namespace backplane::cpu {
namespace {

struct Portable {
  using Int __attribute__((vector_size(16))) = int32_t;
  using Float __attribute__((vector_size(16))) = float;
  using Bytes __attribute__((vector_size(16))) = uint8_t;
  template <Codes>
  using Code = Bytes;
  struct Eight {
    const int8_t* x;
  };
  static constexpr int lanes = 4, vectors = 2, most_rows = 2, sums = 4;
  static constexpr bool signed8 = false;
  static constexpr int32_t bias8 = 0;
  static constexpr int64_t ahead = 1024;

  static BACKPLANE_DOT Bytes read(const uint8_t* from) {
    Bytes v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static BACKPLANE_DOT void write(uint8_t* to, Bytes v) { std::memcpy(to, &v, sizeof v); }
  template <Codes>
  static BACKPLANE_DOT Bytes code(Bytes v) {
    return v;
  }
  static BACKPLANE_DOT Bytes low(Bytes v) { return v & 15; }
  static BACKPLANE_DOT Bytes high(Bytes v) { return v >> 4; }
  static BACKPLANE_DOT Eight eight(const int8_t* x) { return {x}; }
  static BACKPLANE_DOT Int dot(Int sum, Bytes code, const int8_t* x) {
    for (int lane = 0; lane < lanes; ++lane)
      for (int j = 0; j < 4; ++j) sum[lane] += int32_t(code[4 * lane + j]) * x[j];
    return sum;
  }
  static BACKPLANE_DOT Int dot_first(Int sum, Bytes code, Eight x) { return dot(sum, code, x.x); }
  static BACKPLANE_DOT Int dot_second(Int sum, Bytes code, Eight x) { return dot(sum, code, x.x + 4); }
  static BACKPLANE_DOT Int all(int32_t v) { return Int{} + v; }
  static BACKPLANE_DOT void keep(Int& v) { __asm__("" : "+m"(v)); }
  static BACKPLANE_DOT Int add(Int a, Int b) { return a + b; }
  static BACKPLANE_DOT Float all(float v) { return Float{} + v; }
  static BACKPLANE_DOT Float load(const float* from) {
    Float v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static constexpr bool has_halves = false;
  static BACKPLANE_DOT void store(float* to, Float v) { std::memcpy(to, &v, sizeof v); }
  static BACKPLANE_DOT Float to_float(Int v) { return __builtin_convertvector(v, Float); }
  static BACKPLANE_DOT Float multiply(Float a, Float b) { return a * b; }
  static BACKPLANE_DOT Float multiply_add(Float a, Float b, Float c) { return a * b + c; }
};

bool available() { return true; }

}  // namespace

const DotKernels kPortableDots = kernels_of<Portable>("portable", &available);

}  // namespace backplane::cpu
