// CUDA's kernel tables. Everything is launched on Launch::stream and returns at once; nothing is
// allocated or synchronised, so that a sequence can be captured in a CUDA graph. An error of a
// launch is left to cudaGetLastError. Multiplications have no entry here: ATen calls cuBLAS.
// Rows and columns are counted in 32 bits (offsets in 64): fewer than 2^31 units or tokens.
#include "cell.cuh"
#include "dropout_mask.cuh"
#include "gold_arrives.cuh"
#include "masks.cuh"
#include "mixture.cuh"
#include "recode_backward.cuh"
#include "shared_masks.cuh"
#include "softmax_signal.cuh"
#include "softmax_signal_backward.cuh"
#include "tables.h"
#include "trial.cuh"

namespace fused_recoder {
namespace {

template <typename S>
constexpr Kernels<S> table() {
  using A = typename AccumulateIn<S>::type;
  Kernels<S> kernels{};
  kernels.cell_forward = cuda::cell_forward<S>;
  kernels.softmax_signal = cuda::softmax_signal<S>;
  kernels.softmax_signal_backward = cuda::softmax_signal_backward<S>;
  kernels.gold_arrives = cuda::gold_arrives<S>;
  kernels.mixture_signal = cuda::mixture_signal<S>;
  kernels.mixture_signal_backward = cuda::mixture_signal_backward<S>;
  kernels.recode = cuda::recode<S>;
  kernels.recode_backward = cuda::recode_backward<S>;
  kernels.cell_backward = cuda::cell_backward<S>;
  kernels.dropout_mask = cuda::dropout_mask<A>;
  kernels.mask_rows = cuda::mask_rows<S>;
  kernels.mask_sum = cuda::mask_sum<S>;
  kernels.gate = cuda::gate<A>;
  kernels.trial_step = cuda::trial_step<S>;
  kernels.trial_verdict = cuda::trial_verdict<A>;
  kernels.list_units = cuda::list_units;
  kernels.gather_units = cuda::gather_units<S>;
  kernels.scatter_units = cuda::scatter_units<S>;
  kernels.softmax_scratch = cuda::softmax_scratch<A>;
  return kernels;
}

template <typename S>
constexpr Kernels<S> kTable = table<S>();

}  // namespace

const CudaKernels cuda_kernels = {&kTable<float>, &kTable<double>, &kTable<__half>,
                                  &kTable<__nv_bfloat16>};

}  // namespace fused_recoder
