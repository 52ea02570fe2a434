// Multiplies bfloat16 matrices in AMX tiles.
//
// One instruction multiplies 16 rows of 32 numbers by 32 numbers of 16 columns, which lie in pairs: 32-bit words of two
// consecutive numbers of a column. Two by two tiles of sums keep the unit busy while tiles are loaded.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>

#include "isa.h"
#include "transpose.h"

namespace backplane::cpu {

#define BACKPLANE_TILES \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,amx-tile,amx-bf16")))

constexpr int64_t kTileRows = 16;
constexpr int64_t kTilePairs = 16;             // words in a row of a tile
constexpr int64_t kTileSide = 2 * kTileRows;   // rows and columns of the four tiles of sums together
constexpr int64_t kTileDepth = 2 * kTilePairs;  // numbers that one instruction accumulates

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

BACKPLANE_TILES inline void enter_tiles() {
  TileShapes shapes;
  // GCC's intrinsic declares only the first eight bytes as read; without this the compiler may leave the others
  // unwritten.
  __asm__ volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

BACKPLANE_TILES inline void leave_tiles() { _tile_release(); }

// Computes c [32][32] (+)= a [32][steps * 32] * b, where b is words, [steps * 16][32]. Row strides are in bytes.
template <bool kAdd>
BACKPLANE_TILES inline void multiply_tiles(const uint16_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                                           int64_t steps, float* c, int64_t c_stride) {
  float* const lower = reinterpret_cast<float*>(reinterpret_cast<char*>(c) + kTileRows * c_stride);
  if constexpr (kAdd) {
    _tile_loadd(0, c, c_stride);
    _tile_loadd(1, c + kTileRows, c_stride);
    _tile_loadd(2, lower, c_stride);
    _tile_loadd(3, lower + kTileRows, c_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step) {
    const uint16_t* left = a + step * kTileDepth;
    const uint32_t* right = b + step * kTilePairs * (b_stride / 4);
    _tile_loadd(4, left, a_stride);
    _tile_loadd(6, right, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + kTileRows, b_stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left + kTileRows * (a_stride / 2), a_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_stride);
  _tile_stored(1, c + kTileRows, c_stride);
  _tile_stored(2, lower, c_stride);
  _tile_stored(3, lower + kTileRows, c_stride);
}

// Reads `count` numbers, at most a row of a tile, as words of two; the missing ones are zero.
BACKPLANE_INLINE Floats<16> words_of(const uint16_t* from, int64_t count) {
  Floats<16> words{};
  if (count >= kTileDepth)
    std::memcpy(&words, from, sizeof words);
  else if (count > 0)
    std::memcpy(&words, from, count * 2);
  return words;
}

}  // namespace backplane::cpu
#endif
