// Implements linear layers with 8-bit or 4-bit weights: checks the arguments and orders the work of the dot kernels.
//
// With few rows every code is used a few times, so it goes from memory straight into registers. With more rows, the
// codes of a block are widened, a chunk at a time, into a buffer in the L1 cache and multiplied by every part of x,
// with as many parts as stay in the L2 cache. With very many rows, and if the machine supports it, the weight is
// decoded to bfloat16 instead (decoded_linear.h). Each thread has its own blocks, so the result does not depend on the
// number of threads.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

#include "decoded_linear.h"
#include "dot_kernels.h"
#include "quantize_rows.h"
#include "quantized_weight.h"
#include "rows.h"
#include "tiling.h"

namespace backplane::cpu {
namespace {

// Returns the arguments of a dot kernel for rows from `begin` on, except codes, groups and tile.
Product product_of(const QuantizedRows& x, const Weight& weight, int64_t begin, int64_t rows, int64_t group) {
  Product p{};
  p.x = x.codes + begin * x.stride;
  p.x_stride = x.stride;
  p.x_scales = x.scales + begin * weight.groups + group;
  p.x_sums = x.sums + begin * weight.groups + group;
  p.x_groups = weight.groups;
  p.rows = rows;
  return p;
}

// Returns the correction for the zero point: without offsets it is the middle code; `bias` is already subtracted.
int32_t correction_of(const Weight& weight, int32_t bias) {
  const int32_t zero = weight.offsets.defined() ? 0 : 1 << (weight.bits - 1);
  return bias - zero;
}

constexpr int64_t kBytesPerThread = 1 << 14;

// Divides the groups into runs that are multiplied together when there are many rows.
Parts runs_of(const DotKernels& kernels, const Weight& weight) {
  const int64_t most = chunk_bytes() * 2 / 3;  // x passes through the same cache
  return Parts(weight.groups, std::max<int64_t>(1, most / kernels.wide_bytes(weight.group)));
}

template <class T>
void multiply_few(const DotKernels& kernels, const QuantizedRows& x, int64_t m, const Weight& weight,
                  const Result<T>& result) {
  const Parts parts(m, kernels.most_rows);
  const Multiply by_halves = weight.bits == 8 ? kernels.multiply8_halves : kernels.multiply4_halves;
  // Widened numbers serve all rows; with few rows the dot kernel converts half-precision numbers faster itself.
  const bool halves = by_halves != nullptr && m <= kernels.halves_rows && weight.group <= kernels.halves_group &&
                      weight.has_half_numbers();
  const Multiply multiply = halves ? by_halves : weight.bits == 8 ? kernels.multiply8 : kernels.multiply4;
  const int32_t correction = correction_of(weight, weight.bits == 8 ? kernels.bias8 : kernels.bias4);
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / weight.bytes(weight.padded));
  // A dot kernel may add the offsets of all groups of a call before their products. The same runs as with many rows
  // give the same order of additions, so a row's result does not depend on the number of rows.
  const Parts runs = weight.offsets.defined() ? runs_of(kernels, weight) : Parts(weight.groups, weight.groups);
  at::parallel_for(0, weight.blocks, grain, [&](int64_t first, int64_t last) {
    Numbers scales(kernels, weight.scales, weight.groups), offsets(kernels, weight.offsets, weight.groups);
    std::vector<Line> tile(kernels.most_rows * weight.width / 16 + 1);
    for (int64_t block = first; block < last; ++block) {
      const float* block_scales = halves ? nullptr : scales.at(block, 0, weight.groups);
      const float* block_offsets = halves ? nullptr : offsets.at(block, 0, weight.groups);
      for (int64_t part = 0; part < parts.count; ++part) {
        const int64_t begin = parts.begin(part), rows = parts.size(part);
        for (int64_t run = 0; run < runs.count; ++run) {
          const int64_t group = runs.begin(run), numbers = group * weight.width;
          Product p = product_of(x, weight, begin, rows, group);
          p.x += group * weight.group;
          p.codes = weight.at(block, group * weight.group);
          if (halves) {
            p.half_scales = scales.halves_at(block) + numbers;
            p.half_offsets = weight.offsets.defined() ? offsets.halves_at(block) + numbers : nullptr;
          } else {
            p.scales = block_scales + numbers;
            p.offsets = block_offsets != nullptr ? block_offsets + numbers : nullptr;
          }
          p.groups = runs.size(run);
          p.group = weight.group;
          p.correction = correction;
          p.more = run > 0;
          p.tile = tile.data()->floats;
          multiply(p);
        }
        result.write(tile.data()->floats, block, begin, rows);
      }
    }
  });
}

// Some whole groups, or a piece of one.
struct Chunk {
  int64_t position, first_group, groups, length;  // the length of a group, or of the piece
  bool begins;                                    // the first piece; corrections cover the whole group
};

std::vector<Chunk> chunks_of(const DotKernels& kernels, const Weight& weight) {
  const int64_t most = chunk_bytes() * 2 / 3;  // x passes through the same cache
  std::vector<Chunk> chunks;
  const int64_t per_group = kernels.wide_bytes(weight.group);
  if (per_group <= most) {
    const Parts parts = runs_of(kernels, weight);
    for (int64_t part = 0; part < parts.count; ++part)
      chunks.push_back({parts.begin(part) * weight.group, parts.begin(part), parts.size(part), weight.group, true});
    return chunks;
  }
  const int64_t piece = std::max<int64_t>(64, most / weight.width / 64 * 64);
  for (int64_t g = 0; g < weight.groups; ++g)
    for (int64_t from = 0; from < weight.group; from += piece)
      chunks.push_back({g * weight.group + from, g, 1, std::min(piece, weight.group - from), from == 0});
  return chunks;
}

// Prepares the thread for dot kernels on widened codes (AMX tile configuration), and releases it.
class Inside {
 public:
  explicit Inside(const DotKernels& kernels) : kernels_(kernels) {}
  ~Inside() {
    if (length_ > 0 && kernels_.leave != nullptr) kernels_.leave();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  void enter(int64_t length) {
    if (length == length_ || kernels_.enter == nullptr) return;
    kernels_.enter(length);
    length_ = length;
  }

 private:
  const DotKernels& kernels_;
  int64_t length_ = 0;
};

template <class T>
void multiply_many(const DotKernels& kernels, const QuantizedRows& x, int64_t m, const Weight& weight,
                   const Result<T>& result) {
  const Parts parts(m, kernels.many_rows, kernels.row_multiple);
  const bool centred = weight.bits == 4 && !weight.offsets.defined() && kernels.widen4_centred != nullptr;
  const Widen widen = weight.bits == 8 ? kernels.widen8 : centred ? kernels.widen4_centred : kernels.widen4;
  const Multiply multiply = widen != nullptr ? kernels.multiply_wide : kernels.multiply8;
  const int32_t correction = centred ? 0
                             : correction_of(weight, weight.bits == 4  ? kernels.wide_bias4
                                                     : widen != nullptr ? kernels.wide_bias8
                                                                        : kernels.bias8);
  const std::vector<Chunk> chunks = chunks_of(kernels, weight);
  int64_t most_bytes = 0, most_groups = 0;
  for (const Chunk& chunk : chunks) {
    most_bytes = std::max(most_bytes, chunk.groups * kernels.wide_bytes(chunk.length));
    most_groups = std::max(most_groups, chunk.groups);
  }
  const int64_t slice =  // in parts
      std::min(parts.count, std::max<int64_t>(2, input_bytes() / (kernels.many_rows * x.stride)));
  const int64_t tile_size = kernels.many_rows * weight.width;
  at::parallel_for(0, weight.blocks, 1, [&](int64_t first, int64_t last) {
    Inside inside(kernels);
    Numbers scales(kernels, weight.scales, most_groups, true), offsets(kernels, weight.offsets, most_groups);
    std::vector<Line> tiles(slice * tile_size / 16 + 1), wide(widen != nullptr ? most_bytes / 64 + 1 : 0);
    uint8_t* widened = reinterpret_cast<uint8_t*>(wide.data());
    for (int64_t top = 0; top < parts.count; top += slice) {
      const int64_t bottom = std::min(top + slice, parts.count);
      for (int64_t block = first; block < last; ++block)
        for (const Chunk& chunk : chunks) {
          const uint8_t* codes = weight.at(block, chunk.position);
          if (widen != nullptr) widen(codes, chunk.groups, chunk.length, widened);
          inside.enter(chunk.length);
          const float* chunk_scales = scales.at(block, chunk.first_group, chunk.groups);
          const float* chunk_offsets = chunk.begins ? offsets.at(block, chunk.first_group, chunk.groups) : nullptr;
          const bool last_chunk = &chunk == &chunks.back();
          for (int64_t part = top; part < bottom; ++part) {
            const int64_t begin = parts.begin(part), rows = parts.size(part);
            Product p = product_of(x, weight, begin, rows, chunk.first_group);
            p.x += chunk.position;
            p.codes = widen != nullptr ? widened : codes;
            p.scales = chunk_scales;
            p.counted = scales.counted();
            p.offsets = chunk_offsets;
            p.groups = chunk.groups;
            p.group = chunk.length;
            p.correction = chunk.begins ? correction : 0;
            p.more = chunk.position > 0;
            p.tile = tiles.data()->floats + (part - top) * tile_size;
            // Codes lie in the order of use, and with few parts reading them takes the longest: each part prefetches
            // its share of the next chunk.
            const int64_t bytes = chunk.groups * weight.bytes(chunk.length), count = bottom - top;
            p.ahead_bytes = (weight.bytes(chunk.length) / count + 63) / 64 * 64;
            const int64_t asked = (part - top) * chunk.groups * p.ahead_bytes;
            if (asked < bytes) p.ahead = codes + bytes + asked;
            if (last_chunk) result.expect(block, begin, rows);
            multiply(p);
            if (last_chunk) result.write(p.tile, block, begin, rows);
          }
        }
    }
  });
}

// Converts blocks of another width to this machine's: [blocks, any, width, …] -> [blocks', any, width', …].
at::Tensor with_width(const at::Tensor& blocks, int64_t width) {
  const int64_t rows = blocks.size(0) * blocks.size(2), count = (rows + width - 1) / width;
  at::Tensor flat = blocks.transpose(1, 2).flatten(0, 1);  // [rows, any, …]
  std::vector<int64_t> shape = flat.sizes().vec();
  shape[0] = count * width - rows;
  if (shape[0] > 0) flat = at::cat({flat, at::zeros(shape, flat.options())});
  return flat.unflatten(0, {count, width}).transpose(1, 2).contiguous();
}

Weight weight_of(const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& offsets,
                 int64_t bits, int64_t out_features, const DotKernels& kernels) {
  TORCH_CHECK(bits == 8 || bits == 4, "quantized_linear: weights of ", bits, " bits are not supported; use 4 or 8");
  const bool is_signed = codes.scalar_type() == at::kChar;
  TORCH_CHECK(codes.dim() == 4 && codes.size(3) == 4 && scales.dim() == 3 && codes.size(0) == scales.size(0) &&
                  codes.size(2) == scales.size(2) && scales.size(1) > 0 && codes.size(2) > 0 &&
                  (codes.scalar_type() == at::kByte || (is_signed && bits == 8)),
              "quantized_linear: codes ", codes.sizes(), " (", codes.scalar_type(), ") and scales ", scales.sizes(),
              " do not belong together; pack the weight with Device.quantized_layout");
  Weight weight;
  weight.bits = bits;
  weight.padded = codes.size(1) * 32 / bits;
  weight.groups = scales.size(1);
  weight.group = weight.padded / weight.groups;
  TORCH_CHECK(weight.padded % weight.groups == 0 && weight.group % 8 == 0, "quantized_linear: ", weight.padded,
              " input positions cannot form ", weight.groups, " groups; the group size must be a multiple of 8");
  // 255 * 127 * 2^16 is the largest sum that fits into 32 bits.
  TORCH_CHECK(weight.group <= 1 << 16, "quantized_linear: a group of ", weight.group,
              " positions is too long; quantize with a group size of at most ", 1 << 16);
  TORCH_CHECK(out_features >= 0 && out_features <= codes.size(0) * codes.size(2), "quantized_linear: codes of ",
              codes.size(0) * codes.size(2), " features cannot give ", out_features, " output features");
  TORCH_CHECK(is_float_type(scales.scalar_type()), "quantized_linear: scales are ", scales.scalar_type(),
              "; use float32, bfloat16 or float16");
  weight.codes = codes;
  weight.scales = scales;
  if (offsets.has_value() && offsets->defined()) {
    TORCH_CHECK(offsets->sizes() == scales.sizes() && is_float_type(offsets->scalar_type()),
                "quantized_linear: offsets ", offsets->sizes(), " (", offsets->scalar_type(),
                ") do not fit scales ", scales.sizes());
    weight.offsets = *offsets;
  }
  const int64_t width = kernels.width;
  const bool other_sign = bits == 8 && is_signed != kernels.signed8;
  if (codes.size(2) != width || other_sign) {
    TORCH_WARN_ONCE("quantized_linear: the weight has blocks of ", codes.size(2), " features (", codes.scalar_type(),
                    "), which is not this machine's layout, so it is rearranged at every call; pack it with ",
                    "Device.quantized_layout");
    if (other_sign) weight.codes = codes.contiguous().view(at::kByte).bitwise_xor(0x80);
    weight.codes = with_width(weight.codes, width);
    weight.scales = with_width(weight.scales, width);
    if (weight.offsets.defined()) weight.offsets = with_width(weight.offsets, width);
  }
  weight.codes = weight.codes.contiguous();
  weight.scales = weight.scales.contiguous();
  if (weight.offsets.defined()) weight.offsets = weight.offsets.contiguous();
  weight.data = static_cast<const uint8_t*>(weight.codes.const_data_ptr());
  weight.width = width;
  weight.blocks = (out_features + width - 1) / width;
  return weight;
}

}  // namespace

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                            const std::optional<at::Tensor>& offsets, int64_t bits, int64_t out_features,
                            const std::optional<at::Tensor>& bias) {
  const DotKernels& kernels = dot_kernels();
  const Weight weight = weight_of(codes, scales, offsets, bits, out_features, kernels);
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) <= weight.padded && is_float_type(x.scalar_type()),
              "quantized_linear: input of shape ", x.sizes(), " (", x.scalar_type(), ") does not fit a weight of ",
              out_features, " x ", weight.padded);
  at::Tensor wide_bias;
  if (bias.has_value() && bias->defined()) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out_features, "quantized_linear: a bias of shape ", bias->sizes(),
                " does not fit ", out_features, " output features");
    wide_bias = bias->to(at::kFloat).contiguous();
  }
  // A decode step makes hundreds of these calls, so work of a microsecond is skipped where it has no effect.
  const at::Tensor rows = (x.dim() == 2 ? x : x.reshape({-1, x.size(-1)})).contiguous();
  at::Tensor out = at::empty({rows.size(0), out_features}, x.options());
  if (out.numel() > 0) {
    const int64_t m = rows.size(0);
    const bool many = m >= kernels.many_from;
    with_float_type(x.scalar_type(), "quantized_linear", [&](auto type) {
      using T = decltype(type);
      const Result<T> result{mutable_elements<T>(out), out_features,
                             wide_bias.defined() ? wide_bias.const_data_ptr<float>() : nullptr, weight.width};
      const int64_t decoded_from = kernels.decoded_from(bits);
      if (decoded_from > 0 && m >= decoded_from) {
        multiply_decoded(kernels, rows, weight, result);
        return 0;
      }
      const QuantizedRows input =
          quantize_rows(rows, weight.padded, weight.groups, many ? kernels.row_multiple : int64_t(1));
      if (many) multiply_many(kernels, input, m, weight, result);
      else multiply_few(kernels, input, m, weight, result);
      return 0;
    });
  }
  if (x.dim() == 2) return out;
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  return out.reshape(shape);
}

}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("quantized_linear", &backplane::cpu::quantized_linear);
}
