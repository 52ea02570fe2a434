// Quantized linear layers of very many rows: the weight is decoded to bfloat16, and so is the input rounded.
//
// A chunk of a block is decoded into memory that stays in the first cache and multiplied by every part of x that stays
// in the second; sums are float32. Rounding to bfloat16 keeps 8 bits of every number, where rounding a group to 8 bits
// keeps as many of its largest: the result is closer to that of the full-precision input.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "quantized_weight.h"

namespace backplane::cpu {

// One row in bfloat16, filled up with zeros. One that is not finite begins with a NaN, which makes all results NaN.
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

template <class T>
void multiply_decoded(const DotKernels& kernels, const at::Tensor& x, const Weight& weight, const Result<T>& result) {
  constexpr int64_t kStep = 32, kRows = 32;  // positions of a tile, rows of a product
  const DecodedKernels& decoded = *kernels.decoded;
  const int64_t m = x.size(0), k = x.size(1), tiled = (weight.padded + kStep - 1) / kStep * kStep;
  // An odd number of cache lines: rows that begin at the same place of every page would share one set of the cache.
  const int64_t stride = (tiled + 31) / 32 * 32 | 32;
  const Parts parts(m, kRows, 16);
  const at::Tensor memory = at::empty({(m + 15) / 16 * 16 * stride}, x.options().dtype(at::kBFloat16));
  uint16_t* rounded = reinterpret_cast<uint16_t*>(memory.mutable_data_ptr());
  const T* from = elements<T>(x);
  const auto round_row = pick<RoundRow<T>>();
  at::parallel_for(0, m, rows_per_thread(k), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) round_row(from + row * k, k, stride, rounded + row * stride);
  });

  const auto decode = weight.bits == 8 ? decoded.decode8 : decoded.decode4;
  const int64_t longest = std::max(kStep, chunk_bytes() / (2 * weight.width) / kStep * kStep);
  const Parts chunks(tiled, longest, kStep);
  const int64_t most_groups = std::min(weight.groups, longest / weight.group + 2);
  const int64_t slice = std::min(parts.count, std::max<int64_t>(2, input_bytes() / (kRows * stride * 2)));  // parts
  const int64_t tile_size = kRows * weight.width;
  at::parallel_for(0, weight.blocks, 1, [&](int64_t first, int64_t last) {
    Numbers scales(kernels, weight.scales, most_groups), offsets(kernels, weight.offsets, most_groups);
    std::vector<Line> tiles(slice * tile_size / 16), wide(longest * weight.width * 2 / 64);
    uint8_t* decoded_chunk = reinterpret_cast<uint8_t*>(wide.data());
    decoded.enter();
    for (int64_t top = 0; top < parts.count; top += slice) {
      const int64_t bottom = std::min(top + slice, parts.count);
      for (int64_t block = first; block < last; ++block)
        for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
          const int64_t begin = chunks.begin(chunk), end = std::min(begin + chunks.size(chunk), weight.padded);
          const int64_t group = begin / weight.group, groups = (end - 1) / weight.group + 1 - group;
          Decoding d{};
          d.codes = weight.at(block, begin);
          d.scales = scales.at(block, group, groups);
          d.offsets = offsets.at(block, group, groups);
          d.positions = end - begin;
          d.group = weight.group;
          d.first_group = (group + 1) * weight.group - begin;
          decode(d, decoded_chunk);
          for (int64_t part = top; part < bottom; ++part) {
            DecodedProduct p{};
            p.weight = decoded_chunk;
            p.x = rounded + parts.begin(part) * stride + begin;
            p.x_stride = stride;
            p.rows = parts.size(part);
            p.positions = chunks.size(chunk);
            p.more = chunk > 0;
            p.tile = tiles.data()->floats + (part - top) * tile_size;
            const bool last_chunk = chunk + 1 == chunks.count;
            if (last_chunk) result.expect(block, parts.begin(part), p.rows);
            decoded.multiply(p);
            if (last_chunk) result.write(p.tile, block, parts.begin(part), p.rows);
          }
        }
    }
    decoded.leave();
  });
}

}  // namespace backplane::cpu
