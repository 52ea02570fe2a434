// Rows of floats as signed 8-bit codes, one scale per row and group: the input of quantized linear layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace backplane::cpu {

struct QuantizedRows {
  at::Tensor memory;  // holds what follows
  int8_t* codes;      // [rows][stride]; past the row's end zeros, past the last row nothing in particular
  int64_t stride;
  float* scales;  // [rows][groups]; NaN throughout a row that is not finite
  int32_t* sums;  // of the codes, [rows][groups]
};

// x is [rows][k], adjacent; `padded` is k filled up to whole groups. Rows are filled up to a multiple of
// `row_multiple`, and there are at least 64 codes past a row's end, because a product may read whole tiles.
QuantizedRows quantize_rows(const at::Tensor& x, int64_t padded, int64_t groups, int64_t row_multiple);

}  // namespace backplane::cpu
