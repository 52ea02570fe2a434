// Compares every set of dot kernels that the machine supports with a plain loop. It needs no PyTorch, so it runs under
// an emulator.
//
//   g++ -std=c++20 -O2 -Icsrc/cpu tests/unit/devices/dot_products_check.cpp csrc/cpu/dot_*.cpp -o check
//
// Leave out dot_kernels.cpp, which needs PyTorch's headers to detect the machine's other instructions. Prints what was
// checked.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "dot_kernels.h"

using backplane::cpu::DotKernels;
using backplane::cpu::Product;

namespace {

std::mt19937 source(1);
int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(source); }

struct Case {
  int bits;
  int64_t rows, groups, group;
  bool offsets, extreme;
};

// Reads a code by the definition of the layout.
int code_at(const std::vector<uint8_t>& codes, const Case& c, bool signed8, int64_t width, int64_t column,
            int64_t position) {
  if (c.bits == 8) return codes[(position / 4 * width + column) * 4 + position % 4] ^ (signed8 ? 0x80 : 0);
  const uint8_t byte = codes[(position / 8 * width + column) * 4 + position % 4];
  return position % 8 < 4 ? byte & 15 : byte >> 4;
}

template <class T>
T* aligned(std::vector<T>& memory, size_t count) {
  memory.resize(count + 64);
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

// With codes as they are, widened first, or as they are with half-precision scales and offsets.
enum class Way { plain, wide, halves };

// Exact: the numbers here have few digits, and are zero or normal in half precision too.
std::vector<uint16_t> halves_of(const std::vector<float>& numbers) {
  std::vector<uint16_t> halves;
  for (const float number : numbers) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    const uint32_t magnitude = number == 0 ? 0 : ((bits & 0x7fffffff) >> 13) - (112 << 10);
    halves.push_back(static_cast<uint16_t>(bits >> 16 & 0x8000 | magnitude));
  }
  return halves;
}

bool check(const DotKernels& kernels, const Case& c, Way way) {
  const bool wide = way == Way::wide, halves = way == Way::halves;
  const int64_t width = kernels.width, positions = c.groups * c.group, stride = positions + 64;
  const int64_t readable = (c.rows + kernels.row_multiple - 1) / kernels.row_multiple * kernels.row_multiple;
  std::vector<uint8_t> codes(positions * width * c.bits / 8);
  for (auto& code : codes) code = c.extreme ? (draw(0, 1) ? 255 : 0) : draw(0, 255);
  // One sign throughout a row of x and one code throughout a feature give the largest possible sums.
  const bool largest = c.extreme && draw(0, 1) == 1;
  if (largest)
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = codes[i % (4 * width)];
  std::vector<int8_t> x(readable * stride);
  for (auto& value : x) value = c.extreme ? (draw(0, 1) ? 127 : -127) : draw(-127, 127);
  if (largest)
    for (size_t i = 0; i < x.size(); ++i) x[i] = x[i / stride * stride];
  std::vector<float> scales(c.groups * width), offsets(c.groups * width), x_scales(c.rows * c.groups);
  for (auto* numbers : {&scales, &offsets, &x_scales})
    for (auto& number : *numbers) number = draw(-1000, 1000) / 1024.0f;
  std::vector<int32_t> sums(c.rows * c.groups);
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t i = 0; i < positions; ++i) sums[r * c.groups + i / c.group] += x[r * stride + i];
  std::vector<float> tile(c.rows * width, 3.0f);
  std::vector<uint8_t> memory;
  Product p{};
  p.codes = codes.data();
  auto multiply = c.bits == 8 ? kernels.multiply8 : kernels.multiply4;
  int32_t bias = c.bits == 8 ? kernels.bias8 : kernels.bias4;
  if (wide) {
    const bool centred = c.bits == 4 && !c.offsets && kernels.widen4_centred != nullptr && draw(0, 1) == 1;
    const auto widen = c.bits == 8 ? kernels.widen8 : centred ? kernels.widen4_centred : kernels.widen4;
    if (widen == nullptr) return true;
    uint8_t* to = aligned(memory, c.groups * kernels.wide_bytes(c.group));
    widen(codes.data(), c.groups, c.group, to);
    p.codes = to;
    multiply = kernels.multiply_wide;
    bias = c.bits == 8 ? kernels.wide_bias8 : centred ? 8 : kernels.wide_bias4;
  }
  const int zero = c.offsets ? 0 : 1 << (c.bits - 1);
  std::vector<uint16_t> half_scales, half_offsets;
  std::vector<float> counted;
  if (halves) {
    multiply = c.bits == 8 ? kernels.multiply8_halves : kernels.multiply4_halves;
    if (multiply == nullptr || c.rows > kernels.halves_rows || c.group > kernels.halves_group) return true;
    half_scales = halves_of(scales);
    half_offsets = halves_of(offsets);
    p.half_scales = half_scales.data();
    p.half_offsets = c.offsets ? half_offsets.data() : nullptr;
  } else {
    p.scales = scales.data();
    if (kernels.counter != 0 && draw(0, 3) > 0) {  // as for scales in half precision, which these could be
      for (const float scale : scales) counted.push_back(-kernels.counter * scale);
      p.counted = counted.data();
    }
    p.offsets = c.offsets ? offsets.data() : nullptr;
  }
  p.x = x.data();
  p.x_stride = stride;
  p.x_scales = x_scales.data();
  p.x_sums = sums.data();
  p.x_groups = p.groups = c.groups;
  p.group = c.group;
  p.rows = c.rows;
  p.correction = bias - zero;
  p.tile = tile.data();
  p.more = draw(0, 1) == 1;
  if (wide && kernels.enter != nullptr) kernels.enter(c.group);
  multiply(p);
  if (wide && kernels.leave != nullptr) kernels.leave();
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t column = 0; column < width; ++column) {
      double expected = p.more ? 3.0 : 0.0, size = std::abs(expected);
      for (int64_t i = 0; i < positions; ++i) {
        const int64_t g = i / c.group;
        const int code = code_at(codes, c, kernels.signed8, width, column, i);
        const double weight =
            scales[g * width + column] * double(code - zero) + (c.offsets ? offsets[g * width + column] : 0.0f);
        expected += weight * x_scales[r * c.groups + g] * x[r * stride + i];
        // Kernels may subtract 128 or 8 from codes, or not, and correct the sum afterwards.
        const double reached =
            std::abs(scales[g * width + column]) * (1 << c.bits) + std::abs(offsets[g * width + column]);
        size += reached * std::abs(x_scales[r * c.groups + g] * x[r * stride + i]);
      }
      const double got = tile[r * width + column];
      if (!(std::abs(got - expected) <= 3e-7 * size + 1e-6)) {
        std::printf("%s: %d bits, row %d of %d, %d groups of %d, offsets %d, wide %d, halves %d: %g, not %g\n", kernels.name,
                    c.bits, int(r), int(c.rows), int(c.groups), int(c.group), c.offsets, wide, halves, got, expected);
        return false;
      }
    }
  return true;
}

float as_bfloat16(double value) {
  const float single = float(value);
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  float rounded;
  std::memcpy(&rounded, &bits, sizeof rounded);
  return rounded;
}

// Checks weights that are decoded to bfloat16.
bool check_decoded(const DotKernels& kernels, const Case& c) {
  const int64_t width = kernels.width, positions = c.groups * c.group;
  const int64_t tiled = (positions + 31) / 32 * 32, stride = tiled + 32;
  std::vector<uint8_t> codes(positions * width * c.bits / 8), memory;
  for (auto& code : codes) code = uint8_t(draw(0, 255));
  std::vector<float> scales(c.groups * width), offsets(c.groups * width);
  for (auto* numbers : {&scales, &offsets})
    for (auto& number : *numbers) number = draw(-1000, 1000) / 1024.0f;
  std::vector<uint16_t> x((c.rows + 15) / 16 * 16 * stride);
  std::vector<float> x_values(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    x_values[i] = int64_t(i) % stride < positions ? as_bfloat16(draw(-1000, 1000) / 512.0) : 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x_values[i], sizeof bits);
    x[i] = uint16_t(bits >> 16);
  }
  uint8_t* to = aligned(memory, tiled * width * 2);
  backplane::cpu::Decoding d{};
  d.codes = codes.data();
  d.scales = scales.data();
  d.offsets = c.offsets ? offsets.data() : nullptr;
  d.positions = positions;
  d.group = c.group;
  (c.bits == 8 ? kernels.decoded->decode8 : kernels.decoded->decode4)(d, to);
  std::vector<float> tile(32 * width, 3.0f);
  backplane::cpu::DecodedProduct p{};
  p.weight = to;
  p.x = x.data();
  p.x_stride = stride;
  p.rows = c.rows;
  p.positions = tiled;
  p.tile = tile.data();
  kernels.decoded->enter();
  kernels.decoded->multiply(p);
  kernels.decoded->leave();
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t column = 0; column < width; ++column) {
      double expected = 0, size = 0;
      for (int64_t i = 0; i < positions; ++i) {
        const int64_t at = i / c.group * width + column;
        const double code = code_at(codes, c, false, width, column, i);
        const double weight =
            c.offsets ? scales[at] * code + double(offsets[at]) : scales[at] * (code - (1 << (c.bits - 1)));
        const double term = double(as_bfloat16(weight)) * x_values[r * stride + i];
        expected += term;
        size += std::abs(term);
      }
      if (!(std::abs(tile[r * width + column] - expected) <= 1e-6 * size + 1e-6)) {
        std::printf("%s, decoded: %d bits, row %d of %d, %d groups of %d, offsets %d: %g, not %g\n", kernels.name,
                    c.bits, int(r), int(c.rows), int(c.groups), int(c.group), c.offsets, tile[r * width + column],
                    expected);
        return false;
      }
    }
  return true;
}

}  // namespace

int main() {
  using namespace backplane::cpu;
  const DotKernels* all[] = {
#if defined(__x86_64__)
      &amx_dots(), &kAvx512VnniDots, &kAvxVnniDots, &kAvx2Dots,
#elif defined(__aarch64__)
      &i8mm_dots(), &kDotprodDots, &kNeonDots,
#endif
      &kPortableDots,
  };
  for (const DotKernels* kernels : all) {
    if (!kernels->available()) {
      std::printf("%s: not on this machine\n", kernels->name);
      continue;
    }
    int count = 0;
    for (const int bits : {8, 4})
      for (const int64_t group : {8, 16, 24, 32, 64, 72, 128, 200, 256, 264, 2048})
        for (const bool offsets : {false, true})
          for (const bool extreme : {false, true})
            for (const Way way : {Way::plain, Way::wide, Way::halves})
              for (int64_t rows = 1; rows <= (way == Way::wide ? kernels->many_rows : kernels->most_rows); ++rows) {
                const Case c{bits, rows, group > 1000 ? 1 : draw(1, 9), group, offsets, extreme};
                if (!check(*kernels, c, way)) return 1;
                ++count;
              }
    if (kernels->decoded != nullptr)
      for (const int bits : {8, 4})
        for (const int64_t group : {8, 24, 32, 64, 200})
          for (const bool offsets : {false, true})
            for (int64_t rows = 1; rows <= 32; ++rows) {
              const Case c{bits, rows, draw(1, 8), group, offsets, false};
              if (!check_decoded(*kernels, c)) return 1;
              ++count;
            }
    std::printf("%s: %d products as expected\n", kernels->name, count);
  }
}
