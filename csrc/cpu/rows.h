// Provides views of tensors as rows of adjacent elements, dispatch over element types, and the grain size of threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

namespace backplane::cpu {

// Elements per thread below which another thread does not pay off: about ten microseconds of work with AVX2 and above,
// or with NEON.
#if defined(__aarch64__)
constexpr int64_t kElementsPerThread = 1 << 13;
#else
constexpr int64_t kElementsPerThread = 1 << 15;
#endif

inline int64_t rows_per_thread(int64_t elements_per_row) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, elements_per_row));
}

// The offset of each row of a tensor, in elements. The last dimension is contiguous.
struct Rows {
  int64_t count = 1, width = 1, inner = 1, outer_stride = 0, inner_stride = 0;

  int64_t at(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

// Returns nothing if the last dimension is strided, or if the other dimensions do not fold into two. (A slice of a
// fused projection, viewed as heads, has two.)
inline std::optional<Rows> rows_of(const at::Tensor& tensor) {
  Rows rows;
  const int64_t dims = tensor.dim();
  if (dims == 0) return std::nullopt;
  rows.width = tensor.size(-1);
  if (tensor.stride(-1) != 1 && rows.width > 1) return std::nullopt;
  int64_t sizes[2] = {1, 1}, strides[2] = {0, 0}, found = 0;
  for (int64_t d = dims - 2; d >= 0; --d) {
    const int64_t size = tensor.size(d), stride = tensor.stride(d);
    rows.count *= size;
    if (size == 1) continue;
    if (found > 0 && stride == strides[found - 1] * sizes[found - 1]) {
      sizes[found - 1] *= size;
    } else if (found < 2) {
      sizes[found] = size;
      strides[found++] = stride;
    } else {
      return std::nullopt;
    }
  }
  rows.inner = std::max<int64_t>(1, sizes[0]);
  rows.inner_stride = strides[0];
  rows.outer_stride = strides[1];
  return rows;
}

// Returns the tensor itself if rows_of() can address its rows, else a contiguous copy.
inline at::Tensor walkable(const at::Tensor& tensor) { return rows_of(tensor) ? tensor : tensor.contiguous(); }

// Calls `call` with a value of the C++ type that corresponds to `type`.
template <class F>
auto with_float_type(at::ScalarType type, const char* name, F&& call) {
  switch (type) {
    case at::kFloat: return call(float{});
    case at::kBFloat16: return call(c10::BFloat16{});
    case at::kHalf: return call(c10::Half{});
    default: TORCH_CHECK(false, name, ": type ", type, " is not supported; use float32, bfloat16 or float16");
  }
}

inline bool is_float_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

template <class T>
const T* elements(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* mutable_elements(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Reads a vector or matrix of 32-bit or 64-bit integers with any stride, element by element.
class Integers {
 public:
  Integers(const at::Tensor& tensor, const char* name)
      : data_(tensor.const_data_ptr()), wide_(tensor.scalar_type() == at::kLong) {
    TORCH_CHECK(tensor.dim() >= 1 && (wide_ || tensor.scalar_type() == at::kInt), name,
                ": expected 32-bit or 64-bit integers, got ", tensor.scalar_type(), " of shape ", tensor.sizes());
    size_ = tensor.size(-1);
    stride_ = tensor.stride(-1);
    row_stride_ = tensor.dim() > 1 ? tensor.stride(-2) : 0;
  }

  int64_t size() const { return size_; }
  int64_t operator[](int64_t index) const { return at(0, index); }
  int64_t at(int64_t row, int64_t index) const {
    const int64_t where = row * row_stride_ + index * stride_;
    return wide_ ? static_cast<const int64_t*>(data_)[where] : static_cast<const int32_t*>(data_)[where];
  }

 private:
  const void* data_;
  bool wide_;
  int64_t size_, stride_, row_stride_;
};

}  // namespace backplane::cpu
