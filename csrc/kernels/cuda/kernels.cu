// CUDA's kernel tables. Everything is launched on Launch::stream and returns at once; nothing is
// allocated or synchronised, so that a sequence can be captured in a CUDA graph. An error of a
// launch is left to cudaGetLastError. Multiplications have no entry here: ATen calls cuBLAS.
// Rows and columns are counted in 32 bits (offsets in 64): fewer than 2^31 units or tokens.
#include "cell.cuh"
#include "dropout_mask.cuh"
#include "softmax_signal.cuh"
#include "softmax_signal_backward.cuh"
#include "tables.h"

namespace fused_recoder {
namespace {

template <typename S>
constexpr Kernels<S> table() {
  using A = typename AccumulateIn<S>::type;
  Kernels<S> kernels{};
  kernels.cell_forward = cuda::cell_forward<S>;
  kernels.softmax_signal = cuda::softmax_signal<S>;
  kernels.softmax_signal_backward = cuda::softmax_signal_backward<S>;
  kernels.recode = cuda::recode<S>;
  kernels.cell_backward = cuda::cell_backward<S>;
  kernels.dropout_mask = cuda::dropout_mask<A>;
  kernels.softmax_scratch = cuda::softmax_scratch<A>;
  return kernels;
}

template <typename S>
constexpr Kernels<S> kTable = table<S>();

}  // namespace

const CudaKernels cuda_kernels = {&kTable<float>, &kTable<double>, &kTable<__half>,
                                  &kTable<__nv_bfloat16>};

}  // namespace fused_recoder
