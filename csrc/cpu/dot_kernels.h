// Declares the dot kernels of quantized linear layers: one set per instruction set, chosen at run time.
//
// A weight consists of 8-bit or 4-bit codes, unsigned, or of 8-bit codes minus 128 if a set requires it. They lie in
// blocks of `width` output features, with four input positions of a feature side by side: the operand of one lane of a
// dot-product instruction. The input is signed 8-bit codes. Within a group of positions the dot product is an integer;
// it is then scaled and accumulated in float32.
//
// This file does not use PyTorch, so that the sets can be tested on an emulated processor without it.
#pragma once

#include <cstdint>

namespace backplane::cpu {

// The arguments of a dot kernel: some rows of the input times one block of the weight, over some whole groups or a
// piece of one.
struct Product {
  const uint8_t* codes;   // of the block, from the first group
  const float* scales;    // [groups][width]
  const float* offsets;   // the same shape, or null
  const float* counted;   // scales times the negated `DotKernels::counter`, if that is exact; else null
  const uint16_t *half_scales, *half_offsets;  // the same in half precision instead, for kernels that convert them
  const int8_t* x;        // [rows][positions], rows `x_stride` apart
  int64_t x_stride;
  const float* x_scales;  // [rows][groups], rows `x_groups` apart
  const int32_t* x_sums;  // sums of the codes of x, same shape
  int64_t x_groups;
  int64_t rows;
  int64_t groups;
  int64_t group;       // positions, a multiple of 8; for a piece of a group, the length of the piece
  int32_t correction;  // times the sum of x's codes is added; a piece with a correction has 1,024 positions or more
  bool more;           // accumulate into the tile
  float* tile;         // [rows][width]
  // Memory to prefetch between the multiplications, and how many bytes of it per group; or null.
  const uint8_t* ahead;
  int64_t ahead_bytes;
};

using Multiply = void (*)(const Product&);
// Widens the codes of whole groups, or of a piece of one, to the layout of the kernel for many rows; `to` has room for
// `wide_bytes` per group.
using Widen = void (*)(const uint8_t* codes, int64_t groups, int64_t group, uint8_t* to);

// A block of the weight that is decoded to bfloat16 in tiles of 32 positions.
struct Decoding {
  const uint8_t* codes;
  const float* scales;   // [groups][width]
  const float* offsets;  // the same shape, or null
  int64_t positions;     // a multiple of 8; padded with zeros to whole tiles
  int64_t group;
};

// Some rows of x in bfloat16 times a decoded block.
struct DecodedProduct {
  const uint8_t* weight;
  const uint16_t* x;  // rows `x_stride` apart; 16 or 32 of them must be readable
  int64_t x_stride;
  int64_t rows;
  int64_t positions;  // whole tiles are read
  float* tile;        // [32][32]
};

struct DecodedKernels {  // for blocks of 32 features
  void (*decode8)(const Decoding&, uint8_t* to);
  void (*decode4)(const Decoding&, uint8_t* to);
  void (*multiply)(const DecodedProduct&);
  void (*enter)();  // called in each thread before the first product; leave() after the last
  void (*leave)();
};

struct DotKernels {
  const char* name;
  bool (*available)();
  int64_t width;         // output features of a block
  bool signed8;          // 8-bit codes lie in memory minus 128
  int64_t most_rows;     // rows of a kernel that reads codes as they lie in memory
  Multiply multiply8, multiply4;
  // Variants for half-precision scales and offsets, up to halves_rows rows and halves_group positions of a group; may
  // be null.
  Multiply multiply8_halves, multiply4_halves;
  int64_t halves_rows, halves_group;
  // With many rows, codes are first widened into a cached buffer if that is faster. Zero is then the codes' own zero,
  // minus a bias that the instructions require.
  int64_t many_rows;       // rows of a kernel on widened codes
  int64_t row_multiple;    // alignment of parts of x; x is padded to it
  int64_t many_from;       // rows of the whole input from which widening is faster
  Widen widen8, widen4;    // widen8 may be null: codes are used as they are
  Widen widen4_centred;    // minus 8, for weights without offsets, which then need no correction; may be null
  Multiply multiply_wide;
  int32_t bias8, bias4, wide_bias8, wide_bias4;  // what is subtracted from a code, in memory or by the instructions
  int64_t (*wide_positions)(int64_t group);  // positions of a widened group, padding included
  // Called in each thread before kernels on widened groups of that length, and after the last one; may be null.
  void (*enter)(int64_t group);
  void (*leave)();
  float counter;  // magic number from which kernels count integer sums, for Product::counted; 0: from zero
  void (*from_halves)(const uint16_t* halves, int64_t count, float* to);  // whole vectors; may be null
  // From this many rows on, weights are decoded instead of the input being rounded to 8 bits; may be null.
  const DecodedKernels* decoded;
  int64_t decoded_from8, decoded_from4;
  // Runs dot-product instructions at their full rate, without memory; returns the number of multiplications.
  int64_t (*spin)(int64_t rounds);

  // Returns 0 for never.
  int64_t decoded_from(int64_t bits) const { return decoded == nullptr ? 0 : bits == 8 ? decoded_from8 : decoded_from4; }
  int64_t wide_bytes(int64_t group) const { return wide_positions(group) * width; }
};

// Returns the best set of the machine, unless another was forced or isa() was lowered.
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
