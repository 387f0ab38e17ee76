#include "context.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>

#include <cstdlib>
#include <string>

namespace fused_recoder {

namespace baseline {
extern const CpuKernels cpu_kernels;
}
#ifdef FR_X86
namespace avx2 {
extern const CpuKernels cpu_kernels;
}
namespace avx512 {
extern const CpuKernels cpu_kernels;
}
#endif

namespace {

// The best instruction set of this machine; FUSED_RECODER_ISA asks for a lesser one.
const CpuKernels& pick_cpu_kernels() {
  const char* variable = std::getenv("FUSED_RECODER_ISA");
  const std::string wanted = variable != nullptr ? variable : "";
  TORCH_CHECK_VALUE(
      wanted.empty() || wanted == "baseline" || wanted == "avx2" || wanted == "avx512",
      "FUSED_RECODER_ISA must be baseline, avx2 or avx512, got '", wanted, "'");
#ifdef FR_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  TORCH_CHECK_VALUE(wanted != "avx512" || has_avx512,
                    "FUSED_RECODER_ISA=avx512, but this CPU has no AVX-512");
  TORCH_CHECK_VALUE(wanted != "avx2" || has_avx2,
                    "FUSED_RECODER_ISA=avx2, but this CPU has no AVX2");
  if (has_avx512 && (wanted.empty() || wanted == "avx512")) return avx512::cpu_kernels;
  if (has_avx2 && wanted != "baseline") return avx2::cpu_kernels;
#endif
  return baseline::cpu_kernels;
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& picked = pick_cpu_kernels();
  return picked;
}

void parallel_for(int64_t count, int64_t grain, Launch::Body body, const void* context) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

}  // namespace

const char* cpu_instruction_set() { return cpu_kernels().name; }

template <>
const Kernels<float>& kernels_for<float>(const at::Device& device) {
  TORCH_CHECK(device.is_cpu(), "fused_recoder has no kernels for device ", device);
  return *cpu_kernels().f32;
}

template <>
const Kernels<double>& kernels_for<double>(const at::Device& device) {
  TORCH_CHECK(device.is_cpu(), "fused_recoder has no kernels for device ", device);
  return *cpu_kernels().f64;
}

Launch launch_on(const at::Device&) { return Launch{parallel_for, nullptr}; }

template <typename S>
ConstantMatrix<S>::ConstantMatrix(const at::Tensor& weight, bool transposed, int64_t calls,
                                  int64_t rows)
    : matrix_(transposed ? weight.t() : weight),
      kernels_(&kernels_for<S>(weight.device())),
      launch_(launch_on(weight.device())) {
  // Packing reads and writes the matrix once: what one or two multiplications of few rows cost.
  if (kernels_->gemm == nullptr || (calls < 4 && rows < 256)) return;
  const int64_t inner = matrix_.size(0), cols = matrix_.size(1);
  packed_ = at::empty({kernels_->packed_size(inner, cols)}, weight.options());
  kernels_->pack(launch_, PackMatrix<S>{inner, cols, matrix_.const_data_ptr<S>(), matrix_.stride(0),
                                        matrix_.stride(1), packed_.mutable_data_ptr<S>()});
}

template <typename S>
void ConstantMatrix<S>::multiply(int64_t rows, const S* x, A* out, const A* bias,
                                 bool accumulate) const {
  const int64_t inner = matrix_.size(0), cols = matrix_.size(1);
  if (packed_.defined()) {
    kernels_->gemm(launch_, PackedGemm<S>{rows, inner, cols, x, inner, packed_.const_data_ptr<S>(),
                                          bias, accumulate, out, cols});
    return;
  }
  const auto wrap = [&](const auto* p, at::IntArrayRef sizes) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(p)>>;
    return at::from_blob(const_cast<Element*>(p), sizes,
                         matrix_.options().dtype(c10::CppTypeToScalarType<Element>::value));
  };
  at::Tensor result = wrap(out, {rows, cols});
  const at::Tensor left = wrap(x, {rows, inner});
  if (accumulate) {
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
  if (kernels.outer_gemm == nullptr) {
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
