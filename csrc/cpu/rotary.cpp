// Applies the rotary position embedding in place: the cosines and sines of a token are read once for all of its heads.
//
// The arithmetic is float32 with one rounding, whatever the type of the cos_sin cache.

#include <torch/library.h>

#include <vector>

#include "isa.h"
#include "rows.h"

namespace backplane::cpu {
namespace {

// Reads one row of the cos_sin cache, widened. For interleaved pairs each number is stored twice, and the sine with
// alternating sign, so that x * cos + swapped(x) * sin is the rotation.
template <class Table>
struct ReadAngles {
  template <int W>
  static BACKPLANE_INLINE void run(const Table* row, int64_t half, bool neox, float* cosines, float* sines) {
    float* wide[2] = {cosines, sines};
    for (int part = 0; part < 2; ++part) {
      const Table* from = row + part * half;
      int64_t i = 0;
      for (; i + W <= half; i += W) store<W>(wide[part] + i, read<W>(from + i));
      if (i < half) write_some<W>(wide[part] + i, read_some<W>(from + i, half - i), half - i);
    }
    if (neox) return;
    for (int64_t i = half - 1; i >= 0; --i) {
      cosines[2 * i] = cosines[2 * i + 1] = cosines[i];
      const float sine = sines[i];
      sines[2 * i] = -sine;
      sines[2 * i + 1] = sine;
    }
  }
};

template <int W>
BACKPLANE_INLINE Floats<W> swapped_pairs(Floats<W> v) {
  const Longs<W / 2> pairs = bits_as<Longs<W / 2>>(v);
  return bits_as<Floats<W>>(Longs<W / 2>((pairs << 32) | (pairs >> 32)));
}

template <class T>
struct Rotate {
  template <int W>
  static BACKPLANE_INLINE void halves(T* head, int64_t half, const float* cosines, const float* sines) {
    T* other = head + half;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
      const Floats<W> a = read<W>(head + i), b = read<W>(other + i);
      const Floats<W> c = load<W>(cosines + i), s = load<W>(sines + i);
      write<W>(head + i, a * c - b * s);
      write<W>(other + i, b * c + a * s);
    }
    if (const int64_t rest = half - i; rest > 0) {
      const Floats<W> a = read_some<W>(head + i, rest), b = read_some<W>(other + i, rest);
      const Floats<W> c = read_some<W>(cosines + i, rest), s = read_some<W>(sines + i, rest);
      write_some<W>(head + i, a * c - b * s, rest);
      write_some<W>(other + i, b * c + a * s, rest);
    }
  }

  template <int W>
  static BACKPLANE_INLINE void pairs(T* head, int64_t count, const float* cosines, const float* sines) {
    int64_t i = 0;
    for (; i + W <= count; i += W) {
      const Floats<W> v = read<W>(head + i);
      write<W>(head + i, v * load<W>(cosines + i) + swapped_pairs<W>(v) * load<W>(sines + i));
    }
    if (const int64_t rest = count - i; rest > 0) {
      const Floats<W> v = read_some<W>(head + i, rest);
      const Floats<W> c = read_some<W>(cosines + i, rest), s = read_some<W>(sines + i, rest);
      write_some<W>(head + i, v * c + swapped_pairs<W>(v) * s, rest);
    }
  }

  template <int W>
  static BACKPLANE_INLINE void run(T* token, int64_t heads, int64_t stride, int64_t half, bool neox,
                                   const float* cosines, const float* sines) {
    for (int64_t h = 0; h < heads; ++h) {
      if (neox)
        halves<W>(token + h * stride, half, cosines, sines);
      else
        pairs<W>(token + h * stride, 2 * half, cosines, sines);
    }
  }
};

// Returns the tensor as [tokens, heads, head_size], in its own memory. Raises if no such view exists.
at::Tensor as_heads(const at::Tensor& x, int64_t tokens, int64_t head_size) {
  TORCH_CHECK(x.dim() >= 1 && head_size > 0 && x.size(-1) % head_size == 0 && x.numel() % (tokens * head_size) == 0,
              "rotary_embedding: shape ", x.sizes(), " does not hold whole heads of size ", head_size, " for ", tokens,
              " positions; pass the head size that the projection was built with");
  if (x.dim() == 3 && x.size(0) == tokens && x.size(2) == head_size) return x;
  return x.view({tokens, x.numel() / (tokens * head_size), head_size});
}

void rotate(const at::Tensor& x, const int64_t* positions, int64_t tokens, const at::Tensor& table, int64_t head_size,
            bool neox) {
  const int64_t half = table.size(1) / 2;
  at::Tensor heads = x;
  bool spread = false;
  int64_t count = x.size(-1) / head_size, head_stride = head_size;
  if (x.dim() != 2 || x.size(0) != tokens || x.stride(1) != 1 || x.size(1) % head_size != 0) {
    heads = as_heads(x, tokens, head_size);
    spread = heads.stride(2) != 1;
    if (spread) heads = heads.contiguous();
    count = heads.size(1);
    head_stride = heads.stride(1);
  }
  with_float_type(heads.scalar_type(), "rotary_embedding", [&](auto tag) {
    using T = decltype(tag);
    with_float_type(table.scalar_type(), "rotary_embedding", [&](auto table_tag) {
      using Table = decltype(table_tag);
      const auto angles = pick<ReadAngles<Table>>();
      const auto turn = pick<Rotate<T>>();
      const Table* rows = elements<Table>(table);
      T* data = mutable_elements<T>(heads);
      const int64_t row_stride = table.stride(0), token_stride = heads.stride(0);
      at::parallel_for(0, tokens, rows_per_thread(count * 2 * half), [&](int64_t begin, int64_t end) {
        std::vector<float> wide(4 * half);
        for (int64_t t = begin; t < end; ++t) {
          angles(rows + positions[t] * row_stride, half, neox, wide.data(), wide.data() + 2 * half);
          turn(data + t * token_stride, count, head_stride, half, neox, wide.data(), wide.data() + 2 * half);
        }
      });
    });
  });
  if (spread) as_heads(x, tokens, head_size).copy_(heads);
}

void rotary_embedding(const at::Tensor& positions, const at::Tensor& query, const std::optional<at::Tensor>& key,
                      const at::Tensor& table, int64_t head_size, bool neox) {
  TORCH_CHECK(head_size > 0 && table.dim() == 2 && table.size(1) % 2 == 0 && table.size(1) <= head_size,
              "rotary_embedding: the cos_sin cache has shape ", table.sizes(), " for heads of size ", head_size,
              "; it must have an even number of columns, at most the head size");
  const int64_t tokens = positions.numel();
  if (tokens == 0) return;
  const bool plain = positions.scalar_type() == at::kLong && positions.is_contiguous();
  const at::Tensor where = plain ? positions : positions.to(at::kLong).contiguous();
  const int64_t* at_position = where.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK(at_position[t] >= 0 && at_position[t] < table.size(0), "rotary_embedding: position ", at_position[t],
                " is outside the cos_sin cache, which has ", table.size(0), " rows");
  const at::Tensor rows = table.stride(1) == 1 ? table : table.contiguous();
  rotate(query, at_position, tokens, rows, head_size, neox);
  if (key) rotate(*key, at_position, tokens, rows, head_size, neox);
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) { library.impl("rotary_embedding", &backplane::cpu::rotary_embedding); }
