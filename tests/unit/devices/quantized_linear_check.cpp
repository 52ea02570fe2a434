// Compares quantized_linear as a whole, including the rounding of the input, with a plain loop.
//
// The program is for the sanitizers, which see every tensor because PyTorch takes its memory from the C library. Prints
// what was checked.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <cstdio>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "dot_kernels.h"

namespace backplane::cpu {
at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                            const std::optional<at::Tensor>& offsets, int64_t bits, int64_t out_features,
                            const std::optional<at::Tensor>& bias);
}
extern "C" {
int backplane_cpu_quantized_width();
int backplane_cpu_quantized_signed();
const char* backplane_cpu_known_dot_products();
int backplane_cpu_force_dot_products(const char* name);
}

namespace {

std::mt19937 source(1);
float draw() { return std::normal_distribution<float>()(source); }

at::Tensor floats(at::IntArrayRef sizes, float size, at::ScalarType type = at::kFloat) {
  at::Tensor made = at::empty(sizes, at::kFloat);
  for (int64_t i = 0; i < made.numel(); ++i) made.mutable_data_ptr<float>()[i] = draw() * size;
  return made.to(type);
}

double as_bfloat16(double value) {
  return double(static_cast<float>(c10::BFloat16(static_cast<float>(value))));
}

struct Case {
  int64_t bits, rows, fan_in, out, group;
  bool offsets, bias;
  at::ScalarType type;
};

bool check(const Case& c, const std::string& name) {
  const int64_t width = backplane_cpu_quantized_width(), blocks = (c.out + width - 1) / width;
  const int64_t step = c.group > 0 ? c.group : 8, padded = (c.fan_in + step - 1) / step * step;
  const int64_t group = c.group > 0 ? c.group : padded, groups = padded / group;
  const bool is_signed = c.bits == 8 && backplane_cpu_quantized_signed() != 0;
  at::Tensor codes = at::empty({blocks, padded * c.bits / 32, width, 4}, is_signed ? at::kChar : at::kByte);
  uint8_t* bytes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  for (int64_t i = 0; i < codes.numel(); ++i) bytes[i] = uint8_t(source());
  const at::Tensor scales = floats({blocks, groups, width}, 0.01f, at::kHalf);
  const at::Tensor offsets = floats({blocks, groups, width}, 0.1f, at::kHalf);
  const at::Tensor x = floats({c.rows, c.fan_in}, 1.0f, c.type), bias = floats({c.out}, 1.0f, c.type);
  const at::Tensor got =
      backplane::cpu::quantized_linear(x, codes, scales, c.offsets ? std::optional(offsets) : std::nullopt, c.bits,
                                       c.out, c.bias ? std::optional(bias) : std::nullopt)
          .to(at::kFloat);
  const at::Tensor values = x.to(at::kFloat), wide_scales = scales.to(at::kFloat), wide_offsets = offsets.to(at::kFloat),
                   wide_bias = bias.to(at::kFloat);
  const float* const scale_at = wide_scales.const_data_ptr<float>();
  const float* const offset_at = wide_offsets.const_data_ptr<float>();
  const float* const value_at = values.const_data_ptr<float>();
  const auto& kernels = backplane::cpu::dot_kernels();
  const bool decoded = kernels.decoded_from(c.bits) > 0 && c.rows >= kernels.decoded_from(c.bits);
  for (int64_t r = 0; r < c.rows; ++r) {
    std::vector<double> rounded(padded);
    for (int64_t g = 0; g < groups; ++g) {
      float largest = 0;
      const auto at = [&](int64_t i) { return i < c.fan_in ? value_at[r * c.fan_in + i] : 0.0f; };
      for (int64_t i = g * group; i < (g + 1) * group; ++i) largest = std::max(largest, std::abs(at(i)));
      for (int64_t i = g * group; i < (g + 1) * group; ++i)
        rounded[i] = decoded       ? as_bfloat16(at(i))
                     : largest > 0 ? std::nearbyint(at(i) * (127.0f / largest)) * double(largest / 127.0f) : 0.0;
    }
    for (int64_t n = 0; n < c.out; ++n) {
      const int64_t block = n / width, column = n % width;
      double expected = c.bias ? wide_bias.const_data_ptr<float>()[n] : 0.0, size = std::abs(expected);
      for (int64_t i = 0; i < padded; ++i) {
        const int64_t per = 32 / c.bits, where = ((block * padded / per + i / per) * width + column) * 4 + i % 4;
        const uint8_t byte = is_signed ? bytes[where] ^ 0x80 : bytes[where];
        const int code = c.bits == 8 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
        const int64_t number = (block * groups + i / group) * width + column;
        const double scale = scale_at[number];
        const double offset =
            c.offsets ? double(offset_at[number]) : -scale * (1 << (c.bits - 1));
        const double weight = decoded ? as_bfloat16(scale * code + offset) : scale * code + offset;
        expected += weight * rounded[i];
        size += (std::abs(scale) * (1 << c.bits) + std::abs(offset)) * std::abs(rounded[i]);
      }
      const double found = got.const_data_ptr<float>()[r * c.out + n];
      const double step_of_type = c.type == at::kFloat ? 0 : c.type == at::kHalf ? 0x1p-11 : 0x1p-8;
      if (!(std::abs(found - expected) <= 1e-6 * size + std::abs(expected) * step_of_type * 1.001 + 1e-6)) {
        std::printf("%s: %d bits, %d x %d -> %d, groups of %d: [%d, %d] is %g, not %g\n", name.c_str(), int(c.bits),
                    int(c.rows), int(c.fan_in), int(c.out), int(group), int(r), int(n), found, expected);
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  at::set_num_threads(2);
  std::stringstream names(backplane_cpu_known_dot_products());
  for (std::string name; std::getline(names, name, ',');) {
    if (backplane_cpu_force_dot_products(name.c_str()) != 0) return 2;
    int count = 0;
    for (const int64_t bits : {8, 4})
      for (const auto& [fan_in, out, group] : {std::tuple{8, 1, 8}, {33, 65, 32}, {100, 31, 64}, {130, 33, 128},
                                               {72, 20, 24}, {577, 70, 0}, {576, 40, 192}, {1601, 35, 32}})
        for (const int64_t rows : {1, 2, 5, 7, 16, 17, 33, 100}) {
          const Case c{bits, rows, fan_in, out, group, count % 2 == 0, count % 3 == 0,
                       count % 5 == 0 ? at::kBFloat16 : count % 5 == 1 ? at::kHalf : at::kFloat};
          if (!check(c, name)) return 1;
          ++count;
        }
    std::printf("%s: %d layers as expected\n", name.c_str(), count);
  }
}
