// Describes a weight of 8-bit or 4-bit codes for the dot kernels, converts its scales and offsets, and stores results.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "dot_kernels.h"
#include "rows.h"
#include "tiling.h"

namespace backplane::cpu {

struct Weight {
  at::Tensor codes, scales, offsets;
  const uint8_t* data;  // of the codes
  int64_t bits, padded, groups, group, width, blocks;

  bool has_half_numbers() const {
    return scales.scalar_type() == at::kHalf && (!offsets.defined() || offsets.scalar_type() == at::kHalf);
  }
  int64_t bytes(int64_t positions) const { return positions * width * bits / 8; }
  // Returns the codes of a block from a position on.
  const uint8_t* at(int64_t block, int64_t position) const { return data + bytes(block * padded + position); }
};

template <class T>
struct ToFloats {
  template <int W>
  static BACKPLANE_INLINE void run(const void* from, int64_t count, float* to) {
    const T* values = static_cast<const T*>(from);
    int64_t i = 0;
    for (; i + W <= count; i += W) store<W>(to + i, read<W>(values + i));
    for (; i < count; ++i) to[i] = static_cast<float>(values[i]);
  }
};

// Provides the scales or offsets of some groups of a block in float32.
class Numbers {
 public:
  Numbers(const DotKernels& kernels, const at::Tensor& tensor, int64_t most_groups, bool counted = false) {
    if (!tensor.defined()) return;
    data_ = static_cast<const char*>(tensor.const_data_ptr());
    size_ = tensor.element_size();
    groups_ = tensor.size(1);
    width_ = tensor.size(2);
    if (tensor.scalar_type() != at::kFloat) wide_.resize(most_groups * width_ / 16 + 1);
    if (tensor.scalar_type() == at::kHalf) from_halves_ = kernels.from_halves;
    // A half-precision scale has eleven significant bits, so its product with the counter is exact in float32.
    if (counted && kernels.counter != 0 && tensor.scalar_type() == at::kHalf) {
      counter_ = kernels.counter;
      counted_.resize(wide_.size());
    }
    convert_ = with_float_type(tensor.scalar_type(), "quantized_linear",
                               [](auto type) { return pick<ToFloats<decltype(type)>>(); });
  }

  // Returns the numbers in half precision, as they lie in memory; the dot kernel converts them.
  const uint16_t* halves_at(int64_t block) const {
    return data_ == nullptr ? nullptr : reinterpret_cast<const uint16_t*>(data_) + block * groups_ * width_;
  }

  const float* at(int64_t block, int64_t group, int64_t groups) {
    if (data_ == nullptr) return nullptr;
    const char* from = data_ + (block * groups_ + group) * width_ * size_;
    if (wide_.empty()) return reinterpret_cast<const float*>(from);
    const int64_t count = groups * width_;
    // The numbers of the next call follow; they are prefetched while these are used.
    for (int64_t ahead = 0; ahead < count * size_; ahead += 64) __builtin_prefetch(from + count * size_ + ahead);
    float* to = wide_.data()->floats;
    if (from_halves_ != nullptr) from_halves_(reinterpret_cast<const uint16_t*>(from), count, to);
    else convert_(from, count, to);
    if (!counted_.empty()) {
      float* counted = counted_.data()->floats;
      for (int64_t i = 0; i < count; ++i) counted[i] = -counter_ * to[i];
    }
    return to;
  }

  // Returns the numbers that `at` returned last, times the negated counter; or null.
  const float* counted() const { return counted_.empty() ? nullptr : counted_.data()->floats; }

 private:
  const char* data_ = nullptr;
  int64_t size_ = 0, groups_ = 0, width_ = 0;
  float counter_ = 0;
  std::vector<Line> wide_, counted_;
  void (*convert_)(const void*, int64_t, float*) = nullptr;
  void (*from_halves_)(const uint16_t*, int64_t, float*) = nullptr;
};

template <class T>
struct Result {
  T* data;
  int64_t n;
  const float* bias;
  int64_t width;
  decltype(pick<Finish<T>>()) write_row = pick<Finish<T>>();

  // Prefetches the memory that `write` will store to. Rows lie pages apart; waiting for each of many would take a tenth
  // of the whole time. Prefetched before the multiplications, the lines are present after them.
  void expect(int64_t block, int64_t begin, int64_t rows) const {
    const int64_t column = block * width, columns = std::min(width, n - column);
    for (int64_t r = 0; r < rows; ++r) {
      const char* row = reinterpret_cast<const char*>(data + (begin + r) * n + column);
      for (int64_t byte = 0; byte < columns * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(row + byte, 1);
    }
  }

  void write(const float* tile, int64_t block, int64_t begin, int64_t rows) const {
    const int64_t column = block * width, columns = std::min(width, n - column);
    for (int64_t r = 0; r < rows; ++r)
      write_row(tile + r * width, bias ? bias + column : nullptr, data + (begin + r) * n + column, columns);
  }
};

}  // namespace backplane::cpu
