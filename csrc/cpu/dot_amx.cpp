// Implements the dot kernels for many rows with AMX int8; few rows use those of AVX-512 VNNI.
//
// A tile is 16 rows of 64 bytes. One instruction multiplies 16 rows of x, 64 positions each, by 64 positions of 16
// output features and accumulates into a tile of 16 x 16 sums. Four tiles of sums, from two of x and two of the weight,
// keep the unit busy while tiles are loaded. Codes are used minus 128 or 8 (signed), so that no correction is needed
// without offsets.

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BACKPLANE_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,amx-tile,amx-int8")))
#include "dot_amx_bf16.h"
#include "dot_products.h"

namespace backplane::cpu {
namespace {

constexpr int64_t kWidth = 32;

// The number of positions per instruction for a group, at most 64: as many as divide the group evenly.
struct Depth {
  int64_t steps, positions, tile_rows, tile_bytes;

  explicit Depth(int64_t group)
      : steps((group + 63) / 64),
        positions((group + 4 * steps - 1) / (4 * steps) * 4),
        tile_rows(positions / 4),
        tile_bytes(tile_rows * 64) {}
};

int64_t wide_positions(int64_t group) {
  const Depth depth(group);
  return depth.steps * depth.positions;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Configures the tiles: 0 to 3 are sums, 4 and 5 x, 6 and 7 weights.
BACKPLANE_TARGET void enter(int64_t group) {
  const Depth depth(group);
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? depth.positions : 64);
    shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? 16 : depth.tile_rows);
  }
  // GCC's intrinsic declares only the first eight bytes as read; without this the compiler may leave the others
  // unwritten.
  __asm__ volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

BACKPLANE_TARGET void leave() { _tile_release(); }

// Widens codes into consecutive tiles: some positions of the first 16 features, of the other 16, then the next
// positions. A group that does not divide evenly is padded with zeros.
template <bool Nibbles>
BACKPLANE_TARGET void widen_tiles(const uint8_t* codes, int64_t groups, int64_t group, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8), top = _mm512_set1_epi8(char(0x80));
  const Depth depth(group);
  int64_t row = 0;  // row of the tile
  const auto put = [&](__m512i left, __m512i right) __attribute__((always_inline)) BACKPLANE_TARGET {
    _mm512_store_si512(to + row * 64, left);
    _mm512_store_si512(to + depth.tile_bytes + row * 64, right);
    if (++row == depth.tile_rows) {
      row = 0;
      to += 2 * depth.tile_bytes;
    }
  };
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < group; i += 8) {
      const __m512i left = _mm512_loadu_si512(codes), right = _mm512_loadu_si512(codes + 64);
      if constexpr (Nibbles) {
        put(_mm512_sub_epi8(_mm512_and_si512(left, low), eight), _mm512_sub_epi8(_mm512_and_si512(right, low), eight));
        put(_mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(left, 4), low), eight),
            _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(right, 4), low), eight));
        codes += 128;
      } else {
        put(_mm512_xor_si512(left, top), _mm512_xor_si512(right, top));
        put(_mm512_xor_si512(_mm512_loadu_si512(codes + 128), top),
            _mm512_xor_si512(_mm512_loadu_si512(codes + 192), top));
        codes += 256;
      }
    }
    for (int64_t i = group; i < depth.steps * depth.positions; i += 4)
      put(_mm512_setzero_si512(), _mm512_setzero_si512());
  }
}

// Scales the sums of eight rows and one group, and adds them to the result tile.
template <bool Offsets>
BACKPLANE_DOT void finish_eight(const Product& p, int64_t g, const int32_t* dots, int64_t row) {
  if (row >= p.rows) return;
  const float* scales = p.scales + g * kWidth;
  const __m512 left = _mm512_loadu_ps(scales), right = _mm512_loadu_ps(scales + 16);
  __m512 left_offset = _mm512_setzero_ps(), right_offset = left_offset;
  if constexpr (Offsets) {
    const __m512 bias = _mm512_set1_ps(float(p.correction));  // offsets refer to unsigned codes
    left_offset = _mm512_fmadd_ps(bias, left, _mm512_loadu_ps(p.offsets + g * kWidth));
    right_offset = _mm512_fmadd_ps(bias, right, _mm512_loadu_ps(p.offsets + g * kWidth + 16));
  }
  // Local copies, because the compiler must assume that the stores may alias p.
  const int64_t next = p.x_groups;
  const float* x_scales = p.x_scales + row * next + g;
  const int32_t* x_sums = p.x_sums + row * next + g;
  const int32_t* from = dots + row / 16 * 512 + row % 16 * 16;
  float* to = p.tile + row * kWidth;
  const __mmask16 more = p.more || g > 0 ? 0xffff : 0;  // a new result tile is not read
  const auto finish_row = [&](int64_t r) __attribute__((always_inline)) BACKPLANE_TARGET {
    const __m512 x_scale = _mm512_set1_ps(x_scales[r * next]);
    __m512 first = _mm512_maskz_loadu_ps(more, to + r * kWidth);
    __m512 second = _mm512_maskz_loadu_ps(more, to + r * kWidth + 16);
    if constexpr (Offsets) {
      const __m512 total = _mm512_set1_ps(x_scales[r * next] * float(x_sums[r * next]));
      first = _mm512_fmadd_ps(left_offset, total, first);
      second = _mm512_fmadd_ps(right_offset, total, second);
    }
    const __m512 left_dot = __builtin_convertvector((__v16si)_mm512_load_si512(from + r * 16), __v16sf);
    const __m512 right_dot = __builtin_convertvector((__v16si)_mm512_load_si512(from + r * 16 + 256), __v16sf);
    _mm512_storeu_ps(to + r * kWidth, _mm512_fmadd_ps(left_dot, _mm512_mul_ps(left, x_scale), first));
    _mm512_storeu_ps(to + r * kWidth + 16, _mm512_fmadd_ps(right_dot, _mm512_mul_ps(right, x_scale), second));
  };
  const int64_t count = p.rows - row;
  if (count >= 8) repeat<8>(BACKPLANE_DO(r) { finish_row(r); });
  else for (int64_t r = 0; r < count; ++r) finish_row(r);
}

// Tile instructions have long latencies, so the work of three groups is interleaved by hand: the multiplications of one
// group begin while the sums of the previous group are stored and those of the group before that are scaled.
template <bool Both, bool Offsets>
BACKPLANE_TARGET void multiply_tiles(const Product& p) {
  alignas(64) int32_t dots[2][4 * 256];
  const Depth depth(p.group);
  const uint8_t *codes = p.codes, *ahead = p.ahead;
  for (int64_t g = 0; g < p.groups; ++g) {
    const int8_t* x = p.x + g * p.group;
    if (ahead != nullptr)
      for (const uint8_t* end = ahead + p.ahead_bytes; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
    int32_t *stored = dots[(g + 1) % 2], *ready = dots[g % 2];
    const bool finish = g >= 2;
    _tile_loadd(6, codes, 64);
    _tile_loadd(4, x, p.x_stride);
    if (g > 0) _tile_stored(0, stored, 64);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 6);
    if (finish) finish_eight<Offsets>(p, g - 2, ready, 0);
    _tile_loadd(7, codes + depth.tile_bytes, 64);
    if (g > 0) _tile_stored(1, stored + 256, 64);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 7);
    if (finish) finish_eight<Offsets>(p, g - 2, ready, 8);
    if constexpr (Both) {
      _tile_loadd(5, x + 16 * p.x_stride, p.x_stride);
      if (g > 0) _tile_stored(2, stored + 512, 64);
      _tile_zero(2);
      _tile_dpbssd(2, 5, 6);
      if (finish) finish_eight<Offsets>(p, g - 2, ready, 16);
      if (g > 0) _tile_stored(3, stored + 768, 64);
      _tile_zero(3);
      _tile_dpbssd(3, 5, 7);
      if (finish) finish_eight<Offsets>(p, g - 2, ready, 24);
    }
    codes += 2 * depth.tile_bytes;
    for (int64_t step = 1; step < depth.steps; ++step) {
      const int8_t* at = x + step * depth.positions;
      _tile_loadd(6, codes, 64);
      _tile_loadd(4, at, p.x_stride);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, codes + depth.tile_bytes, 64);
      _tile_dpbssd(1, 4, 7);
      if constexpr (Both) {
        _tile_loadd(5, at + 16 * p.x_stride, p.x_stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
      codes += 2 * depth.tile_bytes;
    }
  }
  const int64_t last = p.groups - 1;
  int32_t* stored = dots[last % 2];
  _tile_stored(0, stored, 64);
  _tile_stored(1, stored + 256, 64);
  if constexpr (Both) {
    _tile_stored(2, stored + 512, 64);
    _tile_stored(3, stored + 768, 64);
  }
  for (int64_t g = last > 0 ? last - 1 : 0; g <= last; ++g)
    for (int64_t row = 0; row < p.rows; row += 8) finish_eight<Offsets>(p, g, dots[g % 2], row);
}

BACKPLANE_TARGET void multiply_wide(const Product& p) {
  if (p.offsets != nullptr) p.rows > 16 ? multiply_tiles<true, true>(p) : multiply_tiles<false, true>(p);
  else p.rows > 16 ? multiply_tiles<true, false>(p) : multiply_tiles<false, false>(p);
}

BACKPLANE_TARGET int64_t spin(int64_t rounds) {
  enter(64);
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
  return rounds * 4 * 16 * 16 * 64;
}

// Returns whether AMX can be used: the processor has it, the system saves its state, and this process has permission.
// Linux grants the permission only on request.
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
  result.wide_positions = &wide_positions;
  result.enter = &enter;
  result.leave = &leave;
  result.decoded = amx_decoded();
  result.decoded_from8 = 97;
  result.decoded_from4 = 34;
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
