// Implements the kernels for very many rows with AMX bfloat16: the weight is decoded, some blocks at a time, into
// bfloat16 tiles.
//
// Integer sums must leave the tiles after every group to be scaled; with groups of 32 that takes several times as long
// as the multiplications. Decoded weights include their scales, so sums stay in the tiles over the whole row. bfloat16
// has half the multiplications per second, and the input keeps more than 8 bits.
//
// A tile of the weight is 16 pairs of positions by 16 features; a tile of x is 16 rows by 32 positions.

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define BACKPLANE_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")))
#include "dot_amx_bf16.h"
#include "dot_products.h"

namespace backplane::cpu {
namespace {

constexpr int64_t kStep = 32, kTile = 1024, kWidth = 32;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

BACKPLANE_TARGET void enter() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = 16;
  }
  // GCC's intrinsic declares only the first eight bytes as read; without this the compiler may leave the others
  // unwritten.
  __asm__ volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

BACKPLANE_TARGET void leave() { _tile_release(); }

// The scales of 16 features, and what is added to scale * code.
struct Line16 {
  __m512 scale, offset;
};

BACKPLANE_DOT Line16 line_of(const Decoding& d, int64_t at, float zero) {
  const __m512 scale = _mm512_loadu_ps(d.scales + at);
  if (d.offsets != nullptr) return {scale, _mm512_loadu_ps(d.offsets + at)};
  return {scale, _mm512_mul_ps(scale, _mm512_set1_ps(-zero))};
}

// Decodes bytes 2 * Pair and 2 * Pair + 1 of each lane and interleaves the results.
template <int Pair>
BACKPLANE_DOT __m512i decoded_pair(__m512i codes, const Line16& line) {
  // Written without the intrinsics for shifts and conversions, because GCC 12 warns wherever they are used.
  const auto first = (__v16si)((__v16su)codes >> Pair * 16 & 255);
  const auto second = (__v16si)((__v16su)codes >> (Pair * 16 + 8) & 255);
  const __m512 low = _mm512_fmadd_ps(__builtin_convertvector(first, __v16sf), line.scale, line.offset);
  const __m512 high = _mm512_fmadd_ps(__builtin_convertvector(second, __v16sf), line.scale, line.offset);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

template <bool Nibbles>
BACKPLANE_TARGET void decode(const Decoding& d, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15);
  const uint8_t* codes = d.codes;
  int64_t row = 0;  // row of the tile
  const auto put = [&](__m512i left, __m512i right) __attribute__((always_inline)) BACKPLANE_TARGET {
    _mm512_store_si512(to + row * 64, left);
    _mm512_store_si512(to + kTile + row * 64, right);
    if (++row == 16) {
      row = 0;
      to += 2 * kTile;
    }
  };
  int64_t left_in_group = 0, group = 0;
  Line16 left{}, right{};
  for (int64_t i = 0; i < d.positions; i += 8) {
    if (left_in_group == 0) {
      left = line_of(d, group * kWidth, Nibbles ? 8.0f : 128.0f);
      right = line_of(d, group * kWidth + 16, Nibbles ? 8.0f : 128.0f);
      left_in_group = d.group;
      ++group;
    }
    left_in_group -= 8;
    for (int line = 0; line < (Nibbles ? 2 : 4); ++line) __builtin_prefetch(codes + 4096 + line * 64);
    const __m512i a = _mm512_loadu_si512(codes), b = _mm512_loadu_si512(codes + 64);
    __m512i fours[4];  // four positions of the left and of the right features, and the next four
    if constexpr (Nibbles) {
      fours[0] = _mm512_and_si512(a, low);
      fours[1] = _mm512_and_si512(b, low);
      fours[2] = (__m512i)((__v64qu)a >> 4);
      fours[3] = (__m512i)((__v64qu)b >> 4);
      codes += 128;
    } else {
      fours[0] = a;
      fours[1] = b;
      fours[2] = _mm512_loadu_si512(codes + 128);
      fours[3] = _mm512_loadu_si512(codes + 192);
      codes += 256;
    }
    put(decoded_pair<0>(fours[0], left), decoded_pair<0>(fours[1], right));
    put(decoded_pair<1>(fours[0], left), decoded_pair<1>(fours[1], right));
    put(decoded_pair<0>(fours[2], left), decoded_pair<0>(fours[3], right));
    put(decoded_pair<1>(fours[2], left), decoded_pair<1>(fours[3], right));
  }
  while (row != 0) put(_mm512_setzero_si512(), _mm512_setzero_si512());
}

template <bool Both>
BACKPLANE_TARGET void multiply_rows_of_tiles(const DecodedProduct& p) {
  constexpr int64_t kRow = kWidth * sizeof(float), kHalf = 16 * kWidth;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint8_t* weight = p.weight;
  const uint16_t* x = p.x;
  const int64_t x_bytes = p.x_stride * 2;
  for (int64_t i = 0; i < p.positions; i += kStep) {
    _tile_loadd(6, weight, 64);
    _tile_loadd(4, x, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Both) {
      _tile_loadd(5, x + 16 * p.x_stride, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    weight += 2 * kTile;
    x += kStep;
  }
  _tile_stored(0, p.tile, kRow);
  _tile_stored(1, p.tile + 16, kRow);
  if constexpr (Both) {
    _tile_stored(2, p.tile + kHalf, kRow);
    _tile_stored(3, p.tile + kHalf + 16, kRow);
  }
}

BACKPLANE_TARGET void multiply_decoded(const DecodedProduct& p) {
  p.rows > 16 ? multiply_rows_of_tiles<true>(p) : multiply_rows_of_tiles<false>(p);
}

bool has_bfloat16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (1u << 22)) == 0) return false;  // tiles of bfloat16
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5)) != 0;               // and vectors
}

}  // namespace

const DecodedKernels* amx_decoded() {
  static const DecodedKernels kernels = {&decode<false>, &decode<true>, &multiply_decoded, &enter, &leave};
  return has_bfloat16() ? &kernels : nullptr;
}

}  // namespace backplane::cpu
#endif
