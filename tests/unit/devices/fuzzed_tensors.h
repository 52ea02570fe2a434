// Makes tensors of odd shapes and strides from seeded random numbers, and checks that calls succeed or raise, for
// paged_memory_check.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using Sizes = std::vector<int64_t>;

constexpr int64_t kLeast32 = INT32_MIN, kMost32 = INT32_MAX, kLeast64 = INT64_MIN, kMost64 = INT64_MAX;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::mt19937 source(1);
int64_t below(int64_t n) { return static_cast<int64_t>(source() % static_cast<uint64_t>(n)); }
int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
bool once_in(int64_t n) { return below(n) == 0; }
template <class T>
T one_of(std::initializer_list<T> choices) { return choices.begin()[below(static_cast<int64_t>(choices.size()))]; }
float draw() { return std::normal_distribution<float>()(source); }

// Allocates memory that ends where the tensor ends, so that the sanitizer sees the first byte past it. `order` lists
// the dimensions from the outermost, and some get gaps between them.
at::Tensor laid_out(const Sizes& sizes, const Sizes& order, at::ScalarType type) {
  Sizes strides(sizes.size());
  int64_t step = once_in(6) ? 2 : 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = step;
    step = step * std::max<int64_t>(1, sizes[*d]) + (once_in(3) ? between(1, 5) : 0);
  }
  return at::empty_strided(sizes, strides, at::TensorOptions(type));
}

at::Tensor numbers(const Sizes& sizes, const Sizes& order, at::ScalarType type) {
  at::Tensor wide = at::empty(sizes, at::kFloat);
  for (int64_t i = 0; i < wide.numel(); ++i) wide.mutable_data_ptr<float>()[i] = draw();
  return laid_out(sizes, order, type).copy_(wide);
}

at::Tensor integers(const Sizes& sizes, const std::vector<int64_t>& values, at::ScalarType type) {
  at::Tensor made = laid_out(sizes, sizes.size() == 2 ? Sizes(once_in(4) ? Sizes{1, 0} : Sizes{0, 1}) : Sizes{0}, type);
  for (int64_t i = 0; i < made.numel(); ++i) {
    const int64_t columns = sizes.back(), row = sizes.size() == 2 ? i / columns * made.stride(0) : 0;
    const int64_t where = row + i % columns * made.stride(-1);
    if (type == at::kLong) made.mutable_data_ptr<int64_t>()[where] = values[i];
    else made.mutable_data_ptr<int32_t>()[where] = static_cast<int32_t>(values[i]);
  }
  return made;
}

// A contiguous copy for reading single numbers.
struct Plain {
  at::Tensor wide;
  explicit Plain(const at::Tensor& tensor) : wide(tensor.to(at::kFloat).contiguous()) {}
  double operator()(std::initializer_list<int64_t> place) const {
    int64_t where = 0, d = 0;
    for (const int64_t index : place) where += index * wide.stride(d++);
    return wide.const_data_ptr<float>()[where];
  }
};

std::vector<char> bytes_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const char*>(tensor.storage().data());
  return {data, data + tensor.storage().nbytes()};
}

int calls = 0, refusals = 0;

[[noreturn]] void fail(const char* what, const std::string& how) {
  std::printf("%s, call %d: %s\n", what, calls, how.c_str());
  std::fflush(stdout);
  std::exit(1);
}

// Returns whether the call succeeded; if it must not, checks that its results are unchanged.
bool goes_through(const char* what, bool should, const std::vector<at::Tensor>& results,
                  const std::function<void()>& call) {
  ++calls;
  std::vector<std::vector<char>> before;
  for (const at::Tensor& result : results) before.push_back(bytes_of(result));
  try {
    call();
  } catch (const c10::Error& error) {
    if (should) fail(what, std::string("was refused: ") + error.what_without_backtrace());
    for (size_t i = 0; i < results.size(); ++i)
      if (bytes_of(results[i]) != before[i]) fail(what, "was refused after something was written");
    ++refusals;
    return false;
  }
  if (!should) fail(what, "was not refused");
  return true;
}

double step_of(at::ScalarType type) { return type == at::kFloat ? 0 : type == at::kHalf ? 0x1p-11 : 0x1p-8; }

int64_t strange_block(int64_t blocks, bool wide) {
  if (wide && once_in(2)) return one_of({int64_t(1) << 32, kLeast64, kMost64, -(int64_t(1) << 32)});
  return one_of({int64_t(-1), blocks, blocks + 1, -blocks - 1, kLeast32, kMost32});
}

}  // namespace
