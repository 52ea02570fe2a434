// Products of many rows with AMX; those of few rows are AVX-512 VNNI's.
//
// A tile is 16 rows of 64 bytes. One instruction multiplies 16 rows of x, 64 positions each, by 64 positions of 16 output
// features and adds to a tile of 16 x 16 sums. Four tiles of sums, from two of x and two of the weight, keep the unit
// busy while tiles are loaded. Codes are taken less 128 or 8, so that there is nothing to correct without offsets.

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BACKPLANE_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,amx-tile,amx-int8")))
#include "dot_products.h"

namespace backplane::cpu {
namespace {

constexpr int64_t kWidth = 32, kDepth = 64, kTile = 16 * 64;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

BACKPLANE_TARGET void enter() {
  static const TileShapes shapes;
  _tile_loadconfig(&shapes);
}

BACKPLANE_TARGET void leave() { _tile_release(); }

// Tiles one after another: 64 positions of the first 16 features, of the other 16, the next 64 positions; a group is
// filled up to 64 with zeros.
template <bool Nibbles>
BACKPLANE_TARGET void widen_tiles(const uint8_t* codes, int64_t groups, int64_t group, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8), top = _mm512_set1_epi8(char(0x80));
  for (int64_t g = 0; g < groups; ++g) {
    int64_t step = 0;  // of four positions
    for (; step < group / 4; step += 2) {
      uint8_t* at = to + step / 16 * 2 * kTile + step % 16 * 64;
      for (int half = 0; half < 2; ++half) {
        if (Nibbles) {
          const __m512i both = _mm512_loadu_si512(codes + half * 64);
          _mm512_store_si512(at + half * kTile, _mm512_sub_epi8(_mm512_and_si512(both, low), eight));
          _mm512_store_si512(at + half * kTile + 64,
                             _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), eight));
        } else {
          _mm512_store_si512(at + half * kTile, _mm512_xor_si512(_mm512_loadu_si512(codes + half * 64), top));
          _mm512_store_si512(at + half * kTile + 64,
                             _mm512_xor_si512(_mm512_loadu_si512(codes + kWidth * 4 + half * 64), top));
        }
      }
      codes += (Nibbles ? 1 : 2) * kWidth * 4;
    }
    for (; step % 16 != 0; ++step) {
      uint8_t* at = to + step / 16 * 2 * kTile + step % 16 * 64;
      _mm512_store_si512(at, _mm512_setzero_si512());
      _mm512_store_si512(at + kTile, _mm512_setzero_si512());
    }
    to += step / 16 * 2 * kTile;
  }
}

// The sums of one group, scaled and added to the tile.
template <bool First>
BACKPLANE_TARGET void finish(const Product& p, int64_t g, const int32_t* dots) {
  const __m512 scales[2] = {_mm512_loadu_ps(p.scales + g * kWidth), _mm512_loadu_ps(p.scales + g * kWidth + 16)};
  for (int64_t r = 0; r < p.rows; ++r) {
    const int32_t* from = dots + r / 16 * 512 + r % 16 * 16;
    float* to = p.tile + r * kWidth;
    const __m512 x_scale = _mm512_set1_ps(p.x_scales[r * p.x_groups + g]);
    for (int half = 0; half < 2; ++half) {
      const __m512 dot = __builtin_convertvector((__v16si)_mm512_load_si512(from + half * 256), __v16sf);
      const __m512 scale = _mm512_mul_ps(scales[half], x_scale);
      _mm512_storeu_ps(to + half * 16, First ? _mm512_mul_ps(dot, scale)
                                             : _mm512_fmadd_ps(dot, scale, _mm512_loadu_ps(to + half * 16)));
    }
  }
  if (p.offsets == nullptr) return;
  const __m512 unsigned_from = _mm512_set1_ps(float(p.correction));
  __m512 offsets[2];
  for (int half = 0; half < 2; ++half)
    offsets[half] = _mm512_fmadd_ps(unsigned_from, scales[half], _mm512_loadu_ps(p.offsets + g * kWidth + half * 16));
  for (int64_t r = 0; r < p.rows; ++r) {
    float* to = p.tile + r * kWidth;
    const __m512 total = _mm512_set1_ps(p.x_scales[r * p.x_groups + g] * float(p.x_sums[r * p.x_groups + g]));
    for (int half = 0; half < 2; ++half)
      _mm512_storeu_ps(to + half * 16, _mm512_fmadd_ps(offsets[half], total, _mm512_loadu_ps(to + half * 16)));
  }
}

// Tiles 0 to 3 are sums, 4 and 5 x, 6 and 7 weights. The sums of a group are finished while the next group's multiply.
template <bool Both>
BACKPLANE_TARGET void multiply_tiles(const Product& p) {
  alignas(64) int32_t dots[2][4 * 256];
  const uint8_t* codes = p.codes;
  for (int64_t g = 0; g < p.groups; ++g) {
    const int8_t* x = p.x + g * p.group;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Both) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t i = 0; i < p.group; i += kDepth) {
      _tile_loadd(6, codes, 64);
      _tile_loadd(4, x + i, p.x_stride);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, codes + kTile, 64);
      _tile_dpbssd(1, 4, 7);
      if constexpr (Both) {
        _tile_loadd(5, x + i + 16 * p.x_stride, p.x_stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
      codes += 2 * kTile;
    }
    int32_t* to = dots[g % 2];
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
    if constexpr (Both) {
      _tile_stored(2, to + 512, 64);
      _tile_stored(3, to + 768, 64);
    }
    if (g == 1 && !p.more) finish<true>(p, 0, dots[0]);
    else if (g > 0) finish<false>(p, g - 1, dots[1 - g % 2]);
  }
  const int64_t last = p.groups - 1;
  if (last == 0 && !p.more) finish<true>(p, last, dots[0]);
  else finish<false>(p, last, dots[last % 2]);
}

BACKPLANE_TARGET void multiply_wide(const Product& p) {
  if (p.rows > 16) multiply_tiles<true>(p);
  else multiply_tiles<false>(p);
}

BACKPLANE_TARGET int64_t spin(int64_t rounds) {
  enter();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  leave();
  return rounds * 4 * 16 * 16 * kDepth;
}

// The processor has it, the system saves it, and the system lets this process use it: Linux wants to be asked.
bool available() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!kAvx512VnniDots.available() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & (1u << 24)) == 0 || (d & (1u << 25)) == 0) return false;  // tiles, int8
  unsigned saved, upper;
  __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  constexpr unsigned kTileState = (1u << 17) | (1u << 18);
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return (saved & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

DotKernels kernels() {
  DotKernels result = kAvx512VnniDots;
  result.name = "amx";
  result.available = &available;
  result.many_rows = 32;
  result.row_multiple = 16;
  result.many_from = 7;
  result.widen8 = &widen_tiles<false>;
  result.widen4 = &widen_tiles<true>;
  result.multiply_wide = &multiply_wide;
  result.wide_bias8 = 128;
  result.wide_bias4 = 8;
  result.wide_multiple = kDepth;
  result.enter = &enter;
  result.leave = &leave;
  result.spin = &spin;
  return result;
}

}  // namespace

const DotKernels& amx_dots() {
  static const DotKernels result = kernels();
  return result;
}

}  // namespace backplane::cpu
#endif
