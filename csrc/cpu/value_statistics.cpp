// Counts NaN and infinite values in a tensor and finds its range, for the numeric guard.
//
// Values are nearly always finite. So the first pass over the bits only checks that and finds the range; compilers
// vectorize it, because integer comparisons need no care for NaN. A second pass runs only where a value is not finite.

#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "rows.h"

namespace backplane::cpu {
namespace {

template <class T>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
  static constexpr Int magnitude = 0x7fffffff, infinity = 0x7f800000;
};
template <>
struct Bits<double> {
  using Int = int64_t;
  static constexpr Int magnitude = 0x7fffffffffffffff, infinity = 0x7ff0000000000000;
};
template <>
struct Bits<c10::BFloat16> {
  using Int = int16_t;
  static constexpr Int magnitude = 0x7fff, infinity = 0x7f80;
};
template <>
struct Bits<c10::Half> {
  using Int = int16_t;
  static constexpr Int magnitude = 0x7fff, infinity = 0x7c00;
};

struct Tally {
  int64_t nan = 0, inf = 0, first = -1, last = -1, bad_rows = 0;
  double lowest = std::numeric_limits<double>::infinity(), highest = -lowest;

  void see(double low, double high) {
    lowest = std::min(lowest, low);
    highest = std::max(highest, high);
  }
  // Adds the result of other rows, before or after these; threads end in any order.
  void add(const Tally& other) {
    nan += other.nan;
    inf += other.inf;
    bad_rows += other.bad_rows;
    last = std::max(last, other.last);
    if (other.first >= 0) first = first < 0 ? other.first : std::min(first, other.first);
    see(other.lowest, other.highest);
  }
};

// Maps the bits of a float to an integer with the same order as the floats. The function is its own inverse.
template <class T>
typename Bits<T>::Int ordered(typename Bits<T>::Int bits) {
  using Int = typename Bits<T>::Int;
  return static_cast<Int>(bits ^ ((bits >> (8 * sizeof(Int) - 1)) & Bits<T>::magnitude));
}

template <class T>
double value_of(typename Bits<T>::Int order) {
  const auto bits = ordered<T>(order);
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return static_cast<double>(value);
}

template <class T>
void tally_run(const T* x, int64_t n, int64_t row, Tally* tally) {
  using Int = typename Bits<T>::Int;
  if (n == 0) return;
  const Int* bits = reinterpret_cast<const Int*>(x);
  Int low = std::numeric_limits<Int>::max(), high = std::numeric_limits<Int>::min();
  for (int64_t i = 0; i < n; ++i) {
    const Int order = ordered<T>(bits[i]);
    low = order < low ? order : low;
    high = order > high ? order : high;
  }
  // Infinities and NaN lie at or beyond the bounds.
  if (high < Bits<T>::infinity && low > ordered<T>(static_cast<Int>(Bits<T>::infinity | ~Bits<T>::magnitude))) {
    tally->see(value_of<T>(low), value_of<T>(high));
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const double value = static_cast<double>(x[i]);
    if (std::isfinite(value)) tally->see(value, value);
    else if (std::isnan(value)) ++tally->nan;
    else ++tally->inf;
  }
  if (tally->last != row) ++tally->bad_rows;
  tally->last = row;
  if (tally->first < 0) tally->first = row;
}

template <class T>
Tally tally_rows(const at::Tensor& x, int64_t rows) {
  // A row in memory is as long as the last dimension; a row of the tensor may consist of several of them.
  const at::Tensor from = x.dim() == 0 ? x.reshape({1, 1}) : x.dim() == 1 ? x.unsqueeze(1).contiguous() : walkable(x);
  const Rows all = *rows_of(from);
  const int64_t each = all.count / std::max<int64_t>(from.size(0), 1);
  const T* data = elements<T>(from);
  const bool dense = from.is_contiguous();
  const int64_t width = all.width * each;
  Tally found;
  std::mutex lock;
  at::parallel_for(0, rows, rows_per_thread(width), [&](int64_t begin, int64_t end) {
    Tally mine;
    if (dense) {
      // Rows are adjacent: one pass covers all of them, and is repeated row by row only if it finds a bad value.
      tally_run<T>(data + begin * width, (end - begin) * width, begin, &mine);
      if (mine.bad_rows != 0 && end - begin > 1) {
        mine = Tally();
        for (int64_t r = begin; r < end; ++r) tally_run<T>(data + r * width, width, r, &mine);
      }
    } else {
      for (int64_t r = begin; r < end; ++r)
        for (int64_t part = 0; part < each; ++part) tally_run<T>(data + all.at(r * each + part), all.width, r, &mine);
    }
    std::lock_guard<std::mutex> hold(lock);
    found.add(mine);
  });
  return found;
}

void tally_values(const at::Tensor& x, int64_t rows, const at::Tensor& table, int64_t slot) {
  TORCH_CHECK(table.dim() == 2 && table.size(1) == 7 && table.scalar_type() == at::kFloat && slot >= 0 &&
                  slot < table.size(0),
              "tally_values: the table must be float32 [slots, 7] and have slot ", slot, ", got ", table.scalar_type(),
              " of shape ", table.sizes());
  const int64_t there = x.dim() == 0 ? 1 : x.size(0);
  rows = rows < 0 ? there : std::min(rows, there);
  Tally found;
  if (rows != 0 && x.numel() != 0)
    found = x.scalar_type() == at::kDouble
                ? tally_rows<double>(x, rows)
                : with_float_type(x.scalar_type(), "tally_values",
                                  [&](auto type) { return tally_rows<decltype(type)>(x, rows); });
  const double values[] = {double(found.nan),      double(found.inf), double(found.first), double(found.last),
                           double(found.bad_rows), found.lowest,      found.highest};
  float* const to = mutable_elements<float>(table) + slot * table.stride(0);
  for (int64_t i = 0; i < 7; ++i) to[i * table.stride(1)] = static_cast<float>(values[i]);
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) { library.impl("tally_values", &backplane::cpu::tally_values); }
