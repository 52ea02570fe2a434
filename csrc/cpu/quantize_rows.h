// Rounds rows of floats to signed 8-bit codes with one scale per row and group: the input of quantized linear layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace backplane::cpu {

struct QuantizedRows {
  at::Tensor memory;  // owns the arrays below
  int8_t* codes;      // [rows][stride]; zeros past the row's end, undefined past the last row
  int64_t stride;
  float* scales;  // [rows][groups]; NaN in all groups of a row that is not finite
  int32_t* sums;  // of the codes, [rows][groups]
};

// x is [rows][k], contiguous; `padded` is k rounded up to whole groups. Rows are padded to a multiple of
// `row_multiple`, and at least 64 codes follow a row's end, because a kernel may read whole tiles.
QuantizedRows quantize_rows(const at::Tensor& x, int64_t padded, int64_t groups, int64_t row_multiple);

}  // namespace backplane::cpu
