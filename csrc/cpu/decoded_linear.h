// Multiplies very many rows by a quantized weight: dequantizes the weight to bfloat16 and rounds the input to bfloat16.
//
// As many blocks of the weight as fit into the L2 cache are decoded together and multiplied by one part of x after
// another, which stays in the L1 cache meanwhile. So every weight is decoded once, x is read once for all these blocks,
// and a row of the result is written in longer pieces. Sums are float32. bfloat16 keeps 8 significant bits of every
// number; 8-bit codes keep as many of the largest number of a group only. So the result is closer to that of the
// full-precision input.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "quantized_weight.h"

namespace backplane::cpu {

// Rounds one row to bfloat16 and pads it with zeros. A row that is not finite begins with a NaN, so all its results are
// NaN.
template <class T>
struct RoundRow {
  template <int W>
  static BACKPLANE_INLINE void run(const T* x, int64_t k, int64_t stride, uint16_t* to) {
    constexpr uint32_t kInfinite = 0x7f800000;
    Words<W> largest{};
    int64_t i = 0;
    for (; i + W <= k; i += W) {
      const Floats<W> v = read<W>(x + i);
      const Words<W> size = bits_as<Words<W>>(v) & 0x7fffffffu;
      largest = size > largest ? size : largest;
      const Shorts<W> narrow = to_bfloat<W>(v);
      std::memcpy(to + i, &narrow, sizeof narrow);
    }
    std::memset(to + i, 0, (stride - i) * sizeof *to);
    if (i < k) {
      const Floats<W> v = read_some<W>(x + i, k - i);
      const Words<W> size = bits_as<Words<W>>(v) & 0x7fffffffu;
      largest = size > largest ? size : largest;
      const Shorts<W> narrow = to_bfloat<W>(v);
      std::memcpy(to + i, &narrow, (k - i) * sizeof *to);
    }
    uint32_t each[W], most = 0;
    std::memcpy(each, &largest, sizeof largest);
    for (int lane = 0; lane < W; ++lane) most = std::max(most, each[lane]);
    if (most >= kInfinite) to[0] = 0x7fc0;
  }
};

constexpr int64_t kTilePositions = 32, kTileRows = 32, kTileFeatures = 32;  // of x, and of one product

template <class T>
void multiply_decoded(const DotKernels& kernels, const at::Tensor& x, const Weight& weight, const Result<T>& result) {
  const DecodedKernels& decoded = *kernels.decoded;
  const int64_t m = x.size(0), k = x.size(1);
  const int64_t tiled = (weight.padded + kTilePositions - 1) / kTilePositions * kTilePositions;
  // An odd number of cache lines: rows that begin at the same offset of every page would compete for one set of the
  // cache.
  const int64_t stride = (tiled + 31) / 32 * 32 | 32;
  const Parts parts(m, kTileRows, 16);
  const at::Tensor memory = at::empty({(m + 15) / 16 * 16 * stride}, x.options().dtype(at::kBFloat16));
  uint16_t* rounded = reinterpret_cast<uint16_t*>(memory.mutable_data_ptr());
  const T* from = elements<T>(x);
  const auto round_row = pick<RoundRow<T>>();
  at::parallel_for(0, m, rows_per_thread(k), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) round_row(from + row * k, k, stride, rounded + row * stride);
  });

  const auto decode = weight.bits == 8 ? decoded.decode8 : decoded.decode4;
  const int64_t block_bytes = tiled * weight.width * 2;
  const int64_t together = std::max<int64_t>(1, input_bytes() * 2 / 5 / block_bytes);  // blocks
  at::parallel_for(0, weight.blocks, 1, [&](int64_t first, int64_t last) {
    Numbers scales(kernels, weight.scales, weight.groups), offsets(kernels, weight.offsets, weight.groups);
    // The buffer is thread-local: a new allocation per call would be zeroed and faulted in page by page.
    static thread_local std::vector<Line> kept;
    kept.resize(std::max<size_t>(kept.size(), std::min(together, last - first) * block_bytes / sizeof(Line)));
    uint8_t* memory_of_blocks = reinterpret_cast<uint8_t*>(kept.data());
    Line tile[kTileRows * kTileFeatures / 16];
    decoded.enter();
    for (int64_t begin = first; begin < last; begin += together) {
      const int64_t end = std::min(begin + together, last);
      for (int64_t block = begin; block < end; ++block) {
        Decoding d{};
        d.codes = weight.at(block, 0);
        d.scales = scales.at(block, 0, weight.groups);
        d.offsets = offsets.at(block, 0, weight.groups);
        d.positions = weight.padded;
        d.group = weight.group;
        decode(d, memory_of_blocks + (block - begin) * block_bytes);
      }
      for (int64_t part = 0; part < parts.count; ++part)
        for (int64_t block = begin; block < end; ++block) {
          DecodedProduct p{};
          p.weight = memory_of_blocks + (block - begin) * block_bytes;
          p.x = rounded + parts.begin(part) * stride;
          p.x_stride = stride;
          p.rows = parts.size(part);
          p.positions = tiled;
          p.tile = tile->floats;
          result.expect(block, parts.begin(part), p.rows);
          decoded.multiply(p);
          result.write(p.tile, block, parts.begin(part), p.rows);
        }
    }
    decoded.leave();
  });
}

}  // namespace backplane::cpu
