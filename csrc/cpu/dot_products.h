// Implements the dot kernels once, as templates over the operations of an instruction set; one file per set includes
// it.
//
// Such a file first defines BACKPLANE_TARGET, the target attribute of its functions, and a struct with the vectors and
// operations used below. Every function and lambda carries the attribute: a lambda does not inherit it, and -march
// would put instructions into code that this file shares with others. Everything is in unnamed namespaces, because the
// linker would otherwise use one file's instantiation for all.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "dot_kernels.h"

#define BACKPLANE_DOT inline __attribute__((always_inline)) BACKPLANE_TARGET
#define BACKPLANE_DO(NAME) [&](auto NAME) __attribute__((always_inline)) BACKPLANE_TARGET

namespace backplane::cpu {
namespace {

// Calls f(0), f(1), … with compile-time constants, so that arrays of sums become registers.
template <int... I, class F>
BACKPLANE_DOT void repeat(std::integer_sequence<int, I...>, const F& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
BACKPLANE_DOT void repeat(const F& f) {
  repeat(std::make_integer_sequence<int, N>{}, f);
}

// The memory layout of codes: one byte each, two per byte, or one byte each as the instructions take them.
enum class Codes { bytes, nibbles, wide };

template <class A, Codes C, int V>
BACKPLANE_DOT void read_codes(const uint8_t* from, typename A::template Code<C> (&first)[V],
                              typename A::template Code<C> (&second)[V]) {
  constexpr int bytes = A::lanes * 4;
  repeat<V>(BACKPLANE_DO(v) {
    if constexpr (C == Codes::nibbles) {
      const auto both = A::read(from + v * bytes);
      first[v] = A::low(both);
      second[v] = A::high(both);
    } else {
      first[v] = A::template code<C>(A::read(from + v * bytes));
      second[v] = A::template code<C>(A::read(from + (V + v) * bytes));
    }
  });
}

template <class A, Codes C, int Rows>
BACKPLANE_DOT void multiply_rows(const Product& p) {
  constexpr int V = A::vectors, L = A::lanes, width = V * L;
  // An instruction waits for the previous one on the same accumulator; with few accumulators, each half of a step gets
  // its own.
  constexpr int Sets = Rows * V <= A::sums / 2 ? 2 : 1;
  typename A::Float sums[Rows * V];
  repeat<Rows * V>(BACKPLANE_DO(i) { sums[i] = p.more ? A::load(p.tile + i * L) : A::all(0.0f); });
  const uint8_t* codes = p.codes;
  const int8_t* x = p.x;
  constexpr int64_t step = (C == Codes::nibbles ? 4 : 8) * width;
  for (int64_t g = 0; g < p.groups; ++g) {
    typename A::Int dots[Sets * Rows * V];
    repeat<Rows>(BACKPLANE_DO(r) {
      const auto start = A::all(p.correction * p.x_sums[r * p.x_groups + g]);
      repeat<V>(BACKPLANE_DO(v) { dots[r * V + v] = start; });
      if constexpr (Sets > 1) repeat<V>(BACKPLANE_DO(v) { dots[(Rows + r) * V + v] = A::all(int32_t(0)); });
    });
    for (int64_t i = 0; i < p.group; i += 8) {
      typename A::template Code<C> first[V], second[V];
      read_codes<A, C, V>(codes, first, second);
      // The hardware prefetcher follows one stream well with one row and less well with more; prefetching every line
      // works for all.
      if constexpr (C != Codes::wide)
        repeat<(step + 63) / 64>(BACKPLANE_DO(line) { __builtin_prefetch(codes + A::ahead + line * 64); });
      repeat<Rows>(BACKPLANE_DO(r) {
        const auto eight = A::eight(x + r * p.x_stride);
        repeat<V>(BACKPLANE_DO(v) {
          dots[r * V + v] = A::dot_first(dots[r * V + v], first[v], eight);
        });
        repeat<V>(BACKPLANE_DO(v) {
          constexpr int to = ((Sets - 1) * Rows + r) * V + v;
          dots[to] = A::dot_second(dots[to], second[v], eight);
        });
      });
      codes += step;
      x += 8;
    }
    typename A::Float scales[V];
    repeat<V>(BACKPLANE_DO(v) { scales[v] = A::load(p.scales + g * width + v * L); });
    repeat<Rows>(BACKPLANE_DO(r) {
      const auto x_scale = A::all(p.x_scales[r * p.x_groups + g]);
      repeat<V>(BACKPLANE_DO(v) {
        auto dot = dots[r * V + v];
        if constexpr (Sets > 1) dot = A::add(dot, dots[(Rows + r) * V + v]);
        sums[r * V + v] = A::multiply_add(A::to_float(dot), A::multiply(scales[v], x_scale), sums[r * V + v]);
      });
    });
    if (p.offsets != nullptr) {
      repeat<V>(BACKPLANE_DO(v) { scales[v] = A::load(p.offsets + g * width + v * L); });
      repeat<Rows>(BACKPLANE_DO(r) {
        const auto total = A::all(p.x_scales[r * p.x_groups + g] * float(p.x_sums[r * p.x_groups + g]));
        repeat<V>(BACKPLANE_DO(v) { sums[r * V + v] = A::multiply_add(scales[v], total, sums[r * V + v]); });
      });
    }
  }
  repeat<Rows * V>(BACKPLANE_DO(i) { A::store(p.tile + i * L, sums[i]); });
}

template <class A, Codes C>
BACKPLANE_TARGET void multiply(const Product& p) {
  repeat<A::most_rows>(BACKPLANE_DO(r) {
    if (p.rows == r + 1) multiply_rows<A, C, r + 1>(p);
  });
}

// Widens nibbles to bytes in the same order, or converts bytes to what the instructions take.
template <class A, Codes C>
BACKPLANE_TARGET void widen(const uint8_t* codes, int64_t groups, int64_t group, uint8_t* to) {
  constexpr int V = A::vectors, bytes = A::lanes * 4;
  for (int64_t i = 0; i < groups * group; i += 8) {
    repeat<V>(BACKPLANE_DO(v) {
      if constexpr (C == Codes::nibbles) {
        const auto both = A::read(codes + v * bytes);
        A::write(to + v * bytes, A::low(both));
        A::write(to + (V + v) * bytes, A::high(both));
      } else {
        A::write(to + v * bytes, A::template code<C>(A::read(codes + v * bytes)));
        A::write(to + (V + v) * bytes, A::template code<C>(A::read(codes + (V + v) * bytes)));
      }
    });
    codes += (C == Codes::nibbles ? 1 : 2) * V * bytes;
    to += 2 * V * bytes;
  }
}

template <class A>
BACKPLANE_TARGET int64_t spin(int64_t rounds) {
  uint8_t codes[A::lanes * 4] = {};
  int8_t x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const auto code = A::template code<Codes::wide>(A::read(codes));
  const auto eight = A::eight(x);
  typename A::Int dots[A::sums];
  repeat<A::sums>(BACKPLANE_DO(i) { dots[i] = A::all(int32_t(i)); });
  for (int64_t round = 0; round < rounds; ++round) {
    repeat<A::sums>(BACKPLANE_DO(i) { dots[i] = A::dot_first(dots[i], code, eight); });
    repeat<A::sums>(BACKPLANE_DO(i) { dots[i] = A::dot_second(dots[i], code, eight); });
    // Zero codes leave the sums unchanged; keep() hides that from the compiler.
    repeat<A::sums>(BACKPLANE_DO(i) { A::keep(dots[i]); });
  }
  float kept[A::lanes];
  repeat<A::sums - 1>(BACKPLANE_DO(i) { dots[0] = A::add(dots[0], dots[i + 1]); });
  A::store(kept, A::to_float(dots[0]));
  volatile float sink = kept[0];
  (void)sink;
  return rounds * A::sums * 2 * A::lanes * 4;
}

// Converts half-precision numbers to floats, in whole vectors.
template <class A>
BACKPLANE_TARGET void from_halves(const uint16_t* halves, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += A::lanes) A::store(to + i, A::load_halves(halves + i));
}

inline int64_t as_long(int64_t group) { return group; }

template <class A>
constexpr DotKernels kernels_of(const char* name, bool (*available)()) {
  DotKernels kernels{};
  kernels.name = name;
  kernels.available = available;
  kernels.width = A::vectors * A::lanes;
  kernels.signed8 = A::signed8;
  kernels.most_rows = kernels.many_rows = A::most_rows;
  kernels.row_multiple = 1;
  kernels.many_from = 2 * A::most_rows + 1;
  kernels.multiply8 = &multiply<A, Codes::bytes>;
  kernels.multiply4 = &multiply<A, Codes::nibbles>;
  kernels.widen4 = &widen<A, Codes::nibbles>;
  kernels.multiply_wide = &multiply<A, Codes::wide>;
  kernels.bias8 = kernels.wide_bias8 = A::bias8;
  kernels.wide_positions = &as_long;
  kernels.spin = &spin<A>;
  if constexpr (A::has_halves) kernels.from_halves = &from_halves<A>;
  return kernels;
}

}  // namespace
}  // namespace backplane::cpu
