#include "context.h"

#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/relu.h>

namespace fused_recoder {

template <typename T>
at::Tensor tensor_at(T* data, at::IntArrayRef sizes, const at::Device& device) {
  const auto options = at::TensorOptions(device).dtype(c10::CppTypeToScalarType<T>::value);
  // The device is named: looking it up by address would ask the driver.
  return at::for_blob(data, sizes).options(options).target_device(device).make_tensor();
}

template at::Tensor tensor_at(float*, at::IntArrayRef, const at::Device&);
template at::Tensor tensor_at(double*, at::IntArrayRef, const at::Device&);

template <typename S>
ConstantMatrix<S>::ConstantMatrix(const at::Tensor& weight, bool transposed, int64_t calls,
                                  int64_t rows)
    : matrix_(transposed ? weight.t() : weight),
      kernels_(&kernels_for<S>(weight.device())),
      launch_(launch_on(weight.device())) {
  // Packing reads and writes the matrix once: what one or two multiplications of few rows cost.
  if (!kernels_->packs() || (calls < 4 && rows < 256)) return;
  const int64_t inner = matrix_.size(0), cols = matrix_.size(1);
  packed_ = at::empty({kernels_->packed_size(inner, cols)}, weight.options());
  kernels_->pack(launch_, PackMatrix<S>{inner, cols, matrix_.const_data_ptr<S>(), matrix_.stride(0),
                                        matrix_.stride(1), packed_.mutable_data_ptr<S>()});
}

template <typename S>
void ConstantMatrix<S>::multiply(int64_t rows, const S* x, A* out, const A* bias, bool accumulate,
                                 bool relu) const {
  const int64_t inner = matrix_.size(0), cols = matrix_.size(1);
  if (packed_.defined()) {
    kernels_->gemm(launch_, PackedGemm<S>{rows, inner, cols, x, inner, packed_.const_data_ptr<S>(),
                                          bias, accumulate, out, cols});
    if (relu) tensor_at(out, {rows, cols}, matrix_.device()).relu_();
    return;
  }
  const auto wrap = [&](const auto* p, at::IntArrayRef sizes) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(p)>>;
    return tensor_at(const_cast<Element*>(p), sizes, matrix_.device());
  };
  at::Tensor result = wrap(out, {rows, cols});
  const at::Tensor left = wrap(x, {rows, inner});
  if (relu) {  // one call: libraries apply it on the way out
    at::_addmm_activation_out(result, wrap(bias, {cols}), left, matrix_);
  } else if (accumulate) {
    result.addmm_(left, matrix_);
    if (bias != nullptr) result.add_(wrap(bias, {cols}));
  } else if (bias != nullptr) {
    at::addmm_out(result, wrap(bias, {cols}), left, matrix_);
  } else {
    at::mm_out(result, left, matrix_);
  }
}

template class ConstantMatrix<float>;
template class ConstantMatrix<double>;

template <typename S>
void add_outer(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
  using A = typename AccumulateIn<S>::type;
  const Kernels<S>& kernels = kernels_for<S>(c.device());
  if (!kernels.packs()) {
    c.addmm_(a.t(), b);
    return;
  }
  const int64_t inner = a.size(0), rows = a.size(1), cols = b.size(1);
  const at::Tensor scratch = at::empty({kernels.outer_scratch(inner, rows, cols)}, b.options());
  kernels.outer_gemm(launch_on(c.device()),
                     OuterGemm<S>{inner, rows, cols, a.const_data_ptr<S>(), b.const_data_ptr<S>(),
                                  scratch.mutable_data_ptr<S>(), c.mutable_data_ptr<A>()});
}

template void add_outer<float>(const at::Tensor&, const at::Tensor&, const at::Tensor&);
template void add_outer<double>(const at::Tensor&, const at::Tensor&, const at::Tensor&);

}  // namespace fused_recoder
