// The products of quantized linear layers, one set per instruction set, chosen at run time.
//
// A weight is codes of 8 or 4 bits, from zero on, or those of 8 less 128 where a set wants them so. They lie in blocks
// of `width` output features, four input positions of a feature side by side: what one lane of a dot-product
// instruction takes. The input is signed 8-bit codes. Within a group of positions the product is one of integers; then
// it is scaled and added to a sum in float32.
//
// Nothing here knows PyTorch, so that the sets can be tested on a foreign processor without it.
#pragma once

#include <cstdint>

namespace backplane::cpu {

// Some rows of the input times one block of the weight, over some whole groups or a piece of one.
struct Product {
  const uint8_t* codes;   // of the block, from the first group
  const float* scales;    // [groups][width]
  const float* offsets;   // the same, or none
  const float* counted;   // scales times `DotKernels::counter`, less than zero, where that is exact; or none
  const uint16_t *half_scales, *half_offsets;  // the same in half precision, instead, for products that take them so
  const int8_t* x;        // [rows][positions], rows `x_stride` apart
  int64_t x_stride;
  const float* x_scales;  // [rows][groups], rows `x_groups` apart
  const int32_t* x_sums;  // of the codes of x, the same way
  int64_t x_groups;
  int64_t rows;
  int64_t groups;
  int64_t group;       // positions, a multiple of 8; of a piece of a group, its own
  int32_t correction;  // times the sum of x's codes, is added; a piece that has one is 1,024 positions long or more
  bool more;           // added to what the tile holds
  float* tile;         // [rows][width]
  // Memory that is wanted next, to be asked for between the multiplications, and how much of it with each group; or
  // none.
  const uint8_t* ahead;
  int64_t ahead_bytes;
};

using Multiply = void (*)(const Product&);
// Codes of whole groups, or of a piece of one, as the product over many rows takes them; `to`
// has room for `wide_bytes` per group.
using Widen = void (*)(const uint8_t* codes, int64_t groups, int64_t group, uint8_t* to);

// A block of the weight, to be decoded to bfloat16 in tiles of 32 positions.
struct Decoding {
  const uint8_t* codes;
  const float* scales;   // [groups][width]
  const float* offsets;  // the same, or none
  int64_t positions;     // a multiple of 8; what is missing to whole tiles becomes zero
  int64_t group;
};

// Some rows of x in bfloat16 times what was decoded.
struct DecodedProduct {
  const uint8_t* weight;
  const uint16_t* x;  // rows `x_stride` apart, 16 or 32 of them readable
  int64_t x_stride;
  int64_t rows;
  int64_t positions;  // whole tiles are read
  float* tile;        // [32][32]
};

struct DecodedKernels {  // for blocks of 32 features
  void (*decode8)(const Decoding&, uint8_t* to);
  void (*decode4)(const Decoding&, uint8_t* to);
  void (*multiply)(const DecodedProduct&);
  void (*enter)();  // in each thread, before the first product, and after the last
  void (*leave)();
};

struct DotKernels {
  const char* name;
  bool (*available)();
  int64_t width;         // of a block
  bool signed8;          // codes of 8 bits lie in memory less 128
  int64_t most_rows;     // of a product that reads codes as they are
  Multiply multiply8, multiply4;
  // With scales and offsets in half precision, up to so many rows, and positions of a group; may be none.
  Multiply multiply8_halves, multiply4_halves;
  int64_t halves_rows, halves_group;
  // With many rows codes are widened first, where that gains something, into memory that stays in a cache. What is zero
  // is the codes' own zero, less a bias that the instructions ask for.
  int64_t many_rows;       // of a product of widened codes
  int64_t row_multiple;    // at which parts of x end; it has as many rows, filled up
  int64_t many_from;       // rows of the whole input from which widening pays
  Widen widen8, widen4;    // widen8 may be none: codes are taken as they are
  Widen widen4_centred;    // less 8, for weights without offsets, of which nothing is to be corrected then; may be none
  Multiply multiply_wide;
  int32_t bias8, bias4, wide_bias8, wide_bias4;  // what is off a code, by how it lies or by the instructions
  int64_t (*wide_positions)(int64_t group);  // that a widened group has, filling included
  // In each thread, before products of widened groups of that length, and after the last; may be none.
  void (*enter)(int64_t group);
  void (*leave)();
  float counter;  // from which products count sums of integers, for Product::counted; 0: from zero
  void (*from_halves)(const uint16_t* halves, int64_t count, float* to);  // whole vectors; may be none
  // From so many rows on, weights are decoded rather than the input rounded to 8 bits; may be none.
  const DecodedKernels* decoded;
  int64_t decoded_from8, decoded_from4;
  // As many products as the instructions can do, without memory; returns how many multiplications that were.
  int64_t (*spin)(int64_t rounds);

  // 0: never
  int64_t decoded_from(int64_t bits) const { return decoded == nullptr ? 0 : bits == 8 ? decoded_from8 : decoded_from4; }
  int64_t wide_bytes(int64_t group) const { return wide_positions(group) * width; }
};

// The best that the machine has, unless one was asked for or isa() was lowered.
const DotKernels& dot_kernels();

extern const DotKernels kPortableDots;
#if defined(__x86_64__)
extern const DotKernels kAvx2Dots, kAvxVnniDots, kAvx512VnniDots;
const DotKernels& amx_dots();
#elif defined(__aarch64__)
extern const DotKernels kNeonDots, kDotprodDots;
const DotKernels& i8mm_dots();
#endif

}  // namespace backplane::cpu
