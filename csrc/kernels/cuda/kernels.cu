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

#pragma GCC diagnostic error "-Wmissing-field-initializers"  // an entry that was forgotten

template <typename S, typename A = typename AccumulateIn<S>::type>
constexpr Kernels<S> kTable = {
    .cell_forward = cuda::cell_forward<S>,
    .softmax_signal = cuda::softmax_signal<S>,
    .softmax_signal_backward = cuda::softmax_signal_backward<S>,
    .gold_arrives = cuda::gold_arrives<S>,
    .mixture_signal = cuda::mixture_signal<S>,
    .mixture_signal_backward = cuda::mixture_signal_backward<S>,
    .recode = cuda::recode<S>,
    .recode_backward = cuda::recode_backward<S>,
    .cell_backward = cuda::cell_backward<S>,
    .dropout_mask = cuda::dropout_mask<A>,
    .mask_rows = cuda::mask_rows<S>,
    .mask_sum = cuda::mask_sum<S>,
    .gate = cuda::gate<A>,
    .trial_step = cuda::trial_step<S>,
    .trial_verdict = cuda::trial_verdict<A>,
    .softmax_scratch = cuda::softmax_scratch<A>,
    .list_units = cuda::list_units,
    .gather_units = cuda::gather_units<S>,
    .scatter_units = cuda::scatter_units<S>,
};

}  // namespace

const CudaKernels cuda_kernels = {&kTable<float>, &kTable<double>, &kTable<__half>,
                                  &kTable<__nv_bfloat16>};

}  // namespace fused_recoder
