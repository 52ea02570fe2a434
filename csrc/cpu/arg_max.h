// Finds the first of the largest numbers of each row. Rows are cut into pieces, so that threads can share a single row.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "isa.h"
#include "rows.h"

namespace backplane::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kPiece = 1 << 15;    // elements of a row that one thread searches at a time
constexpr int64_t kStretch = 1 << 11;  // elements whose maximum is computed before it is compared with the best

struct Best {
  float value = -kInfinity;
  int64_t index = 0;

  // Merges the result of a later part of the row.
  void merge(const Best& next) {
    if (!std::isnan(value) && (next.value > value || std::isnan(next.value))) *this = next;
  }
};

// A NaN counts as larger than every number, as in torch.argmax.
template <class T>
struct ArgMax {
  template <int W>
  static BACKPLANE_INLINE void run(const T* x, int64_t n, Best* best) {
    for (int64_t start = 0; start < n; start += kStretch) {
      const int64_t count = n - start < kStretch ? n - start : kStretch;
      const T* part = x + start;
      Floats<W> peak[2] = {all<W>(-kInfinity), all<W>(-kInfinity)};
      Floats<W> nan{};
      int64_t i = 0;
      for (; i + 2 * W <= count; i += 2 * W) {
        const Floats<W> a = read<W>(part + i), b = read<W>(part + i + W);
        nan = a != a ? a : nan;
        nan = b != b ? b : nan;
        peak[0] = larger<W>(a, peak[0]);
        peak[1] = larger<W>(b, peak[1]);
      }
      float top = largest<W>(larger<W>(peak[0], peak[1]));
      bool has_nan = std::isnan(sum<W>(nan));
      for (; i < count; ++i) {
        const float v = static_cast<float>(part[i]);
        has_nan |= v != v;
        top = v > top ? v : top;
      }
      if (!has_nan && !(top > best->value)) continue;
      for (i = 0; i < count; ++i) {
        const float v = static_cast<float>(part[i]);
        if (has_nan ? v != v : v == top) break;
      }
      best->value = has_nan ? std::numeric_limits<float>::quiet_NaN() : top;
      best->index = start + i;
      if (has_nan) return;
    }
  }
};

// `search(row, start, count)` returns the best of a piece, with its index relative to the start of the piece.
template <class Search>
void first_of_largest(int64_t rows, int64_t n, int64_t* chosen, const Search& search) {
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  std::vector<Best> found(rows * pieces);
  at::parallel_for(0, rows * pieces, rows_per_thread(std::min(n, kPiece) / 2), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t start = i % pieces * kPiece;
      found[i] = search(i / pieces, start, std::min(kPiece, n - start));
      found[i].index += start;
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    Best best = found[r * pieces];
    for (int64_t p = 1; p < pieces; ++p) best.merge(found[r * pieces + p]);
    chosen[r] = best.index;
  }
}

}  // namespace backplane::cpu
