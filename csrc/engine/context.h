// What the engine needs beside the kernels of its device: a matrix that stays the same for a whole
// sequence, and buffers addressed by (layer, time).
// Device-independent code includes this only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "device.h"

namespace fused_recoder {

// What rows of `storage` are accumulated in.
inline at::ScalarType accumulate_type(at::ScalarType storage) {
  return storage == at::kDouble ? at::kDouble : at::kFloat;
}

// A dense tensor whose leading dimensions are indexed in the time loop. Views of a tensor cost a
// microsecond each, which is more than some of our kernels take; a pointer costs nothing.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(at::IntArrayRef sizes, const at::TensorOptions& options)
      : Buffer(at::empty(sizes, options)) {}
  explicit Buffer(const at::Tensor& dense) : tensor_(dense) {
    if (!dense.defined()) return;
    TORCH_INTERNAL_ASSERT(dense.is_contiguous());
    data_ = static_cast<T*>(dense.data_ptr());
  }

  const at::Tensor& tensor() const { return tensor_; }
  explicit operator bool() const { return data_ != nullptr; }

  // Start of the block at the given leading indices; null if the buffer is absent.
  template <typename... Index>
  T* operator()(Index... index) const {
    if (data_ == nullptr) return nullptr;
    const int64_t indices[] = {static_cast<int64_t>(index)..., 0};
    int64_t offset = 0;
    for (size_t i = 0; i < sizeof...(index); ++i) offset += indices[i] * tensor_.stride(i);
    return data_ + offset;
  }

 private:
  at::Tensor tensor_;
  T* data_ = nullptr;
};

// A tensor over memory that belongs to someone else. T: float, double.
template <typename T>
at::Tensor tensor_at(T* data, at::IntArrayRef sizes, const at::Device& device);

// What a pass over [rows,vocab] logits needs to split its rows; absent where it does not.
template <typename S>
Buffer<uint8_t> softmax_scratch(const Kernels<S>& kernels, int64_t rows, int64_t vocab,
                                const at::Device& device) {
  const int64_t bytes = kernels.softmax_scratch ? kernels.softmax_scratch(rows, vocab) : 0;
  if (bytes == 0) return {};
  return Buffer<uint8_t>({bytes}, at::TensorOptions(device).dtype(at::kByte));
}

// x -> x * matrix (+ bias), the matrix being `weight` [cols, inner] transposed (a Linear layer) or
// as it is [inner, cols]. Packed at construction where the device has a kernel for it and what is
// going to be multiplied (`calls` times `rows`) pays for the packing. Both operands are rounded to
// the precision, the matrix once.
template <typename S>
class ConstantMatrix {
 public:
  using A = typename AccumulateIn<S>::type;
  ConstantMatrix() = default;
  ConstantMatrix(Precision precision, const at::Tensor& weight, bool transposed, int64_t calls,
                 int64_t rows);

  // out [rows, cols] (+)= x [rows, inner] * matrix (+ bias [cols] or null), all dense. With `relu`
  // (and a bias) the positive part of it.
  void multiply(int64_t rows, const S* x, A* out, const A* bias = nullptr, bool accumulate = false,
                bool relu = false) const;
  // What pack() made of it; null if it is multiplied through ATen.
  const void* packed() const { return packed_.defined() ? packed_.const_data_ptr() : nullptr; }

 private:
  Precision precision_ = Precision::kSame;
  at::Tensor matrix_;  // [inner, cols], any strides; rounded, if it is not packed
  at::Tensor packed_;  // bytes; undefined: multiply through ATen
  const Kernels<S>* kernels_ = nullptr;
  Launch launch_{};
};

// c [M,N] += a^T * b, with a [K,M] and b [K,N]: the gradient of a weight. All dense.
template <typename S>
void add_outer(Precision precision, const at::Tensor& c, const at::Tensor& a, const at::Tensor& b);

}  // namespace fused_recoder
