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

namespace {

// To the numbers that a product of this precision takes. Where libraries multiply halves and sum in
// float they stay halves, elsewhere they are widened again.
at::Tensor rounded(const at::Tensor& t, Precision precision) {
  switch (precision) {
    case Precision::kSame:
      return t;
    case Precision::kBFloat16:
      return t.is_cuda() ? t.to(at::kBFloat16) : t.to(at::kBFloat16).to(t.scalar_type());
    case Precision::kHalf:
      return t.is_cuda() ? t.to(at::kHalf) : t.to(at::kHalf).to(t.scalar_type());
  }
  TORCH_INTERNAL_ASSERT(false);
}

// out (+)= a * b, with a and b as rounded() gives them.
void add_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  at::Tensor result = out;
  if (a.scalar_type() == out.scalar_type()) {
    if (accumulate)
      result.addmm_(a, b);
    else
      at::mm_out(result, a, b);
  } else if (accumulate) {
    result.add_(at::mm(a, b, out.scalar_type()));
  } else {
    at::mm_out(result, a, b, out.scalar_type());
  }
}

}  // namespace

template <typename S>
ConstantMatrix<S>::ConstantMatrix(Precision precision, const at::Tensor& weight, bool transposed,
                                  int64_t calls, int64_t rows)
    : precision_(precision),
      matrix_(transposed ? weight.t() : weight),
      kernels_(&kernels_for<S>(weight.device())),
      launch_(launch_on(weight.device())) {
  // Packing reads and writes the matrix once: what one or two multiplications of few rows cost.
  // Rounding it does so, too.
  const bool few = calls < 4 && rows < 256 && precision == Precision::kSame;
  if (!kernels_->packs() || few) {
    matrix_ = rounded(matrix_, precision);
    return;
  }
  const int64_t inner = matrix_.size(0), cols = matrix_.size(1);
  const Products<A>& products = kernels_->products(precision);
  packed_ = at::empty({products.packed_size(inner, cols)}, weight.options().dtype(at::kByte));
  products.pack(launch_, PackMatrix<A>{inner, cols, matrix_.const_data_ptr<S>(), matrix_.stride(0),
                                       matrix_.stride(1), packed_.mutable_data_ptr()});
}

template <typename S>
void ConstantMatrix<S>::multiply(int64_t rows, const S* x, A* out, const A* bias, bool accumulate,
                                 bool relu) const {
  const int64_t inner = matrix_.size(0), cols = matrix_.size(1);
  if (packed_.defined()) {
    kernels_->products(precision_)
        .gemm(launch_,
              PackedGemm<A>{rows, inner, cols, x, inner, packed(), bias, accumulate, out, cols});
    if (relu) tensor_at(out, {rows, cols}, matrix_.device()).relu_();
    return;
  }
  const auto wrap = [&](const auto* p, at::IntArrayRef sizes) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(p)>>;
    return tensor_at(const_cast<Element*>(p), sizes, matrix_.device());
  };
  at::Tensor result = wrap(out, {rows, cols});
  const at::Tensor left = wrap(x, {rows, inner});
  if (precision_ != Precision::kSame) {
    add_product(result, rounded(left, precision_), matrix_, accumulate);
    if (bias != nullptr) result.add_(wrap(bias, {cols}));
    if (relu) result.relu_();
  } else if (relu) {  // one call: libraries apply it on the way out
    at::_addmm_activation_out(result, wrap(bias, {cols}), left, matrix_);
  } else if (bias != nullptr && !accumulate) {
    at::addmm_out(result, wrap(bias, {cols}), left, matrix_);
  } else {
    add_product(result, left, matrix_, accumulate);
    if (bias != nullptr) result.add_(wrap(bias, {cols}));
  }
}

template class ConstantMatrix<float>;
template class ConstantMatrix<double>;

template <typename S>
void add_outer(Precision precision, const at::Tensor& c, const at::Tensor& a, const at::Tensor& b) {
  using A = typename AccumulateIn<S>::type;
  const Kernels<S>& kernels = kernels_for<S>(c.device());
  if (!kernels.packs()) {
    add_product(c, rounded(a, precision).t(), rounded(b, precision), /*accumulate=*/true);
    return;
  }
  const int64_t inner = a.size(0), rows = a.size(1), cols = b.size(1);
  const Products<A>& products = kernels.products(precision);
  const at::Tensor scratch =
      at::empty({products.outer_scratch(inner, rows, cols)}, b.options().dtype(at::kByte));
  products.outer_gemm(launch_on(c.device()),
                      OuterGemm<A>{inner, rows, cols, a.const_data_ptr<A>(), b.const_data_ptr<A>(),
                                   scratch.mutable_data_ptr(), c.mutable_data_ptr<A>()});
}

template void add_outer<float>(Precision, const at::Tensor&, const at::Tensor&, const at::Tensor&);
template void add_outer<double>(Precision, const at::Tensor&, const at::Tensor&, const at::Tensor&);

}  // namespace fused_recoder
