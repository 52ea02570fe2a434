// Implements the inner product of blocked_linear: a few rows of the input times one block of the weight.
//
// A block is some rows of the weight, transposed in memory: [k][rows]. A step along k then reads adjacent weights and
// multiplies them by one broadcast number per row of the input, and no vector needs a reduction at the end. 16-bit
// weights are widened on load: half the bytes of float32 are read, and the arithmetic is float32 on processors without
// 16-bit arithmetic. They lie in pairs, column j beside column j + W, so that one 32-bit lane holds a weight of each of
// two vectors, and a shift or a mask extracts it.
#pragma once

#include <type_traits>

#include "isa.h"
#include "unroll.h"

namespace backplane::cpu {

// Vectors side by side in a block, and rows at once: as many accumulators as the registers hold beside the operands.
template <int W>
constexpr int block_vectors() {
#if defined(__aarch64__)
  return 4;
#else
  return 2;
#endif
}
template <int W>
constexpr int most_rows() {
  return W == 16 ? 14 : 6;
}
constexpr int kMostRows = 14;

// The same for many rows with weights that are already widened: two blocks side by side need fewer loads of x and of
// the weight per multiplication, which matters where hyperthreads share a core.
template <int W>
constexpr int panel_blocks() {
  return W == 16 ? 2 : 1;
}
constexpr int kMostPanelBlocks = 2;
constexpr int kPanelRows = 6;

// With a longer distance, the hardware prefetcher of a Neoverse-N1 stops, and reads run at half speed.
#if defined(__aarch64__)
constexpr int64_t kBytesAhead = 1 << 10;
#else
constexpr int64_t kBytesAhead = 8 << 10;
#endif

// Reads the columns of one step along k, as V vectors.
template <int W, int V, class T>
BACKPLANE_INLINE void read_columns(const T* from, Floats<W>* to) {
  if constexpr (std::is_same_v<T, float>) {
    unroll<V>(BACKPLANE_UNROLL(v) { to[v] = load<W>(from + v * W); });
  } else {
    unroll<V / 2>(BACKPLANE_UNROLL(pair) {
      Words<W> bits;
      std::memcpy(&bits, from + pair * 2 * W, sizeof bits);
      if constexpr (std::is_same_v<T, c10::BFloat16>) {
        to[2 * pair] = bits_as<Floats<W>>(Words<W>(bits << 16));
        to[2 * pair + 1] = bits_as<Floats<W>>(Words<W>(bits & 0xffff0000u));
      } else {
        to[2 * pair] = widen_ieee<W>(bits & 0xffffu);
        to[2 * pair + 1] = widen_ieee<W>(bits >> 16);
      }
    });
  }
}

// ARM widens four adjacent float16 with one instruction, and would need two more to separate pairs. So the product
// takes them in memory order, one of the first vector beside one of the second, and reorders its sums instead.
#if defined(__aarch64__)
template <int W, class T>
constexpr bool kMixed = W == 4 && std::is_same_v<T, c10::Half>;
BACKPLANE_INLINE void read_mixed(const c10::Half* from, Floats<4>* to) {
  float16x8_t both;
  std::memcpy(&both, from, sizeof both);
  to[0] = bits_as<Floats<4>>(vcvt_f32_f16(vget_low_f16(both)));
  to[1] = bits_as<Floats<4>>(vcvt_high_f32_f16(both));
}
BACKPLANE_INLINE void put_in_order(Floats<4>* two) {
  const auto a = bits_as<float32x4_t>(two[0]), b = bits_as<float32x4_t>(two[1]);
  two[0] = bits_as<Floats<4>>(vuzp1q_f32(a, b));
  two[1] = bits_as<Floats<4>>(vuzp2q_f32(a, b));
}
#else
template <int W, class T>
constexpr bool kMixed = false;
template <class T, class Vector>
void read_mixed(const T* from, Vector* to);  // declared only, never called
template <class Vector>
void put_in_order(Vector* two);
#endif

// Computes tile[row][column] = sum over k of x[row][k] * block[k][column], or adds that to the tile if `more`. The
// tile's rows are adjacent and hold the columns of all `Blocks` blocks, which lie `block_stride` apart. x is [row][k]
// with rows `x_stride` apart, or, rearranged, [k][row] without gaps.
template <int Rows, class T, int Blocks, bool Rearranged>
struct BlockProduct {
  template <int W>
  static BACKPLANE_INLINE void run(const float* x, int64_t x_stride, const T* block, int64_t block_stride, int64_t k,
                                   float* tile, bool more) {
    constexpr int V = Blocks * block_vectors<W>();
    constexpr int most = Rearranged ? (Blocks <= panel_blocks<W>() ? kPanelRows : 0) : most_rows<W>();
    if constexpr (Rows <= most) {
      // A multiply-add waits for the previous one on the same accumulator; with few accumulators, consecutive steps get
      // their own.
      constexpr int Steps = Rows * V >= 8 ? 1 : Rows * V >= 4 ? 2 : 4;
      Floats<W> sums[Steps * Rows * V];
      unroll<Steps * Rows * V>(BACKPLANE_UNROLL(i) { sums[i] = Floats<W>{}; });
      int64_t i = 0;
      // Where a multiply-add can take its factor from any lane of a register, one load reads four numbers of a row.
      if constexpr (kHasFactors && !Rearranged)
        for (; i + 4 <= k; i += 4) {
          Factors numbers[Rows];
          unroll<Rows>(BACKPLANE_UNROLL(r) { numbers[r] = load_factors(x + r * x_stride + i); });
          unroll<4>(BACKPLANE_UNROLL(s) {
            Floats<W> weights[V];
            read_step<W>(block, block_stride, i + s, weights);
            unroll<Rows * V>(BACKPLANE_UNROLL(j) {
              Floats<W>& sum = sums[s % Steps * Rows * V + j];
              sum = add_product<s>(sum, weights[j % V], numbers[j / V]);
            });
          });
        }
      for (; i + Steps <= k; i += Steps)
        unroll<Steps>(BACKPLANE_UNROLL(s) { step<W, s * Rows * V>(x, x_stride, i + s, block, block_stride, sums); });
      for (; i < k; ++i) step<W, 0>(x, x_stride, i, block, block_stride, sums);
      unroll<Rows * V>(BACKPLANE_UNROLL(j) {
        unroll<Steps - 1>(BACKPLANE_UNROLL(s) { sums[j] += sums[(s + 1) * Rows * V + j]; });
      });
      if constexpr (kMixed<W, T>) unroll<Rows * V / 2>(BACKPLANE_UNROLL(pair) { put_in_order(sums + 2 * pair); });
      unroll<Rows * V>(BACKPLANE_UNROLL(j) {
        store<W>(tile + j * W, more ? load<W>(tile + j * W) + sums[j] : sums[j]);
      });
    } else {
      __builtin_unreachable();
    }
  }

 private:
  // Reads the weights of one step along k.
  template <int W>
  static BACKPLANE_INLINE void read_step(const T* block, int64_t block_stride, int64_t i, Floats<W>* to) {
    constexpr int Vectors = block_vectors<W>(), V = Blocks * Vectors;
    // A block is one stream of reads, and the hardware prefetcher stops at the end of a page. One row of float32, which
    // only ARM has in blocks, is slower with software prefetch (Neoverse-N1).
    if constexpr (!Rearranged && !(Rows == 1 && std::is_same_v<T, float>))
      __builtin_prefetch(block + i * (V * W) + kBytesAhead / sizeof(T));
    unroll<Blocks>(BACKPLANE_UNROLL(b) {
      const T* from = block + b * block_stride + i * (Vectors * W);
      if constexpr (kMixed<W, T>)
        unroll<Vectors / 2>(BACKPLANE_UNROLL(pair) { read_mixed(from + pair * 2 * W, to + b * Vectors + 2 * pair); });
      else
        read_columns<W, Vectors>(from, to + b * Vectors);
    });
  }

  template <int W, int First, int Count>
  static BACKPLANE_INLINE void step(const float* x, int64_t x_stride, int64_t i, const T* block, int64_t block_stride,
                                    Floats<W> (&sums)[Count]) {
    constexpr int V = Blocks * block_vectors<W>();
    Floats<W> weights[V];
    read_step<W>(block, block_stride, i, weights);
    if constexpr (kHasFactors && Rearranged && Rows >= 4) {
      const Factors front = load_factors(x + i * Rows), back = load_factors(x + i * Rows + Rows - 4);
      unroll<Rows * V>(BACKPLANE_UNROLL(j) {
        constexpr int r = j / V;
        Floats<W>& sum = sums[First + j];
        if constexpr (r < 4) sum = add_product<r>(sum, weights[j % V], front);
        else sum = add_product<r + 4 - Rows>(sum, weights[j % V], back);
      });
      return;
    }
    unroll<Rows>(BACKPLANE_UNROLL(r) {
      const float value = Rearranged ? x[i * Rows + r] : x[r * x_stride + i];
      // A scalar times a vector compiles to a broadcast from memory; GCC needs more instructions for all<W>(value).
      unroll<V>(BACKPLANE_UNROLL(v) { sums[First + r * V + v] += value * weights[v]; });
    });
  }
};

}  // namespace backplane::cpu
