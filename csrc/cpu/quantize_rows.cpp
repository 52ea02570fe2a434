// Rounds rows to 8-bit codes: scale = largest magnitude / 127, code = x * (127 / largest magnitude) to the nearest
// even, as the reference does.

#include "quantize_rows.h"

#include <ATen/ops/empty.h>

#include <limits>

#include "isa.h"
#include "rows.h"

namespace backplane::cpu {
namespace {

template <int W>
using Bytes __attribute__((vector_size(W))) = int8_t;

constexpr uint32_t kInfinite = 0x7f800000;
constexpr float kSmallest = 0x1p-100f;  // 127 / amax must stay finite
// Magic number: added to a small number, it leaves the nearest integer in the lowest bits.
constexpr float kToInteger = 0x1.8p23f;

template <int W>
BACKPLANE_INLINE Words<W> larger_word(Words<W> a, Words<W> b) {
  return a > b ? a : b;
}

template <int W>
BACKPLANE_INLINE Words<W> magnitude(Floats<W> v) {
  return bits_as<Words<W>>(v) & 0x7fffffffu;
}

// Compares halves of the vector until one element is left; a loop over the elements would take longer than a short
// group.
template <int W>
BACKPLANE_INLINE uint32_t largest_word(Words<W> v) {
#if defined(__aarch64__)
  if constexpr (W == 4) return vmaxvq_u32(bits_as<uint32x4_t>(v));
#endif
  Words<W / 2> halves[2];
  std::memcpy(halves, &v, sizeof v);
  if constexpr (W == 2) return std::max(halves[0][0], halves[1][0]);
  else return largest_word<W / 2>(larger_word<W / 2>(halves[0], halves[1]));
}

template <int W>
BACKPLANE_INLINE int32_t total_of(Ints<W> v) {
#if defined(__aarch64__)
  if constexpr (W == 4) return vaddvq_s32(bits_as<int32x4_t>(v));
#endif
  Ints<W / 2> halves[2];
  std::memcpy(halves, &v, sizeof v);
  if constexpr (W == 2) return halves[0][0] + halves[1][0];
  else return total_of<W / 2>(halves[0] + halves[1]);
}

// Returns floats whose lowest bits are the codes. |v| * inverse is at most 127 plus a rounding error, so no clamping is
// needed. Values that are not finite give any code, and their row gets the scale NaN.
template <int W>
BACKPLANE_INLINE Floats<W> shifted(Floats<W> v, float inverse) {
  v *= inverse;
  // Keeps the compiler from fusing the product with the addition: one rounding less would give other codes than the
  // reference.
#if defined(__x86_64__)
  __asm__("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__("" : "+w"(v));
#else
  v = v > 127.0f ? all<W>(127.0f) : v;
#endif
  return v + kToInteger;
}

template <int W>
BACKPLANE_INLINE Ints<W> rounded(Floats<W> v, float inverse) {
  return bits_as<Ints<W>>(shifted<W>(v, inverse)) - bits_as<int32_t>(kToInteger);
}

#if defined(__aarch64__)
// Narrows sixteen codes at once; GCC would narrow four at a time.
template <class T>
BACKPLANE_INLINE void quantize_sixteen(const T* x, float inverse, int8_t* codes, Ints<4>* total) {
  uint16x8_t words[4];
  for (int v = 0; v < 4; ++v) words[v] = bits_as<uint16x8_t>(shifted<4>(read<4>(x + v * 4), inverse));
  const uint8x16_t low = vreinterpretq_u8_u16(vuzp1q_u16(words[0], words[1]));
  const uint8x16_t high = vreinterpretq_u8_u16(vuzp1q_u16(words[2], words[3]));
  const int8x16_t made = vreinterpretq_s8_u8(vuzp1q_u8(low, high));
  vst1q_s8(codes, made);
  *total = bits_as<Ints<4>>(vpadalq_s16(bits_as<int32x4_t>(*total), vpaddlq_s8(made)));
}
#endif

// Quantizes one row. Magnitudes are compared as integers, so that infinities and NaNs are the largest and none is lost.
template <class T>
struct QuantizeRow {
  template <int W>
  static BACKPLANE_INLINE void run(const T* x, int64_t k, int64_t padded, int64_t groups, int8_t* codes, int64_t stride,
                                   float* scales, int32_t* sums) {
    const int64_t group = padded / groups;
    uint32_t most = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group, end = std::min(begin + group, k);
      Words<W> vector{}, other{};
      int64_t i = begin;
      for (; i + 2 * W <= end; i += 2 * W) {
        vector = larger_word<W>(vector, magnitude<W>(read<W>(x + i)));
        other = larger_word<W>(other, magnitude<W>(read<W>(x + i + W)));
      }
      vector = larger_word<W>(vector, other);
      for (; i + W <= end; i += W) vector = larger_word<W>(vector, magnitude<W>(read<W>(x + i)));
      if (i < end) vector = larger_word<W>(vector, magnitude<W>(read_some<W>(x + i, end - i)));
      const uint32_t bits = largest_word<W>(vector);
      most = std::max(most, bits);
      const float amax = bits_as<float>(bits), inverse = amax < kSmallest ? 0.0f : 127.0f / amax;
      scales[g] = amax / 127.0f;
      Ints<W> total{};
      i = begin;
#if defined(__aarch64__)
      for (; i + 16 <= end; i += 16) quantize_sixteen(x + i, inverse, codes + i, &total);
#endif
      for (; i + W <= end; i += W) {
        const Ints<W> values = rounded<W>(read<W>(x + i), inverse);
        total += values;
        const Bytes<W> narrow = __builtin_convertvector(values, Bytes<W>);
        std::memcpy(codes + i, &narrow, W);
      }
      if (i < end) {
        const Ints<W> values = rounded<W>(read_some<W>(x + i, end - i), inverse);
        total += values;
        const Bytes<W> narrow = __builtin_convertvector(values, Bytes<W>);
        std::memcpy(codes + i, &narrow, end - i);
      }
      sums[g] = total_of<W>(total);
    }
    std::memset(codes + k, 0, stride - k);
    if (most >= kInfinite) std::fill_n(scales, groups, std::numeric_limits<float>::quiet_NaN());
  }
};

int64_t filled(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

template <class T>
void quantize(const at::Tensor& x, int64_t padded, int64_t groups, const QuantizedRows& to) {
  const int64_t k = x.size(1);
  const T* from = elements<T>(x);
  const auto quantize_row = pick<QuantizeRow<T>>();
  at::parallel_for(0, x.size(0), rows_per_thread(k), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      quantize_row(from + row * k, k, padded, groups, to.codes + row * to.stride, to.stride, to.scales + row * groups,
                   to.sums + row * groups);
  });
}

}  // namespace

QuantizedRows quantize_rows(const at::Tensor& x, int64_t padded, int64_t groups, int64_t row_multiple) {
  const int64_t rows = x.size(0);
  QuantizedRows result;
  // An odd number of cache lines: rows that begin at the same offset of every page would compete for one set of the
  // cache.
  result.stride = filled(padded + 64, 64) | 64;
  const int64_t code_bytes = filled(rows, row_multiple) * result.stride, numbers = rows * groups;
  result.memory = at::empty({code_bytes + numbers * 8}, x.options().dtype(at::kByte));
  uint8_t* memory = result.memory.mutable_data_ptr<uint8_t>();
  result.codes = reinterpret_cast<int8_t*>(memory);
  result.scales = reinterpret_cast<float*>(memory + code_bytes);
  result.sums = reinterpret_cast<int32_t*>(memory + code_bytes + numbers * 4);
  with_float_type(x.scalar_type(), "quantized_linear", [&](auto type) {
    quantize<decltype(type)>(x, padded, groups, result);
    return 0;
  });
  return result;
}

}  // namespace backplane::cpu
