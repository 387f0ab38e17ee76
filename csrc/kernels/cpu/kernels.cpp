// The CPU's kernel table for one instruction set. Compiled once per set (setup.py), each time with
// another FR_ISA and FR_VECTOR_BYTES and the matching compiler flags. Includes nothing of torch or
// of the C++ library: inline functions from there would be compiled with flags that the machine at
// hand may not support, and the linker might pick them for everyone.
#include "cell.h"
#include "gemm.h"
#include "mixture.h"
#include "shared_mask.h"
#include "softmax_signal.h"
#include "stream_decode.h"

namespace fused_recoder {
namespace FR_ISA {
namespace {

#pragma GCC diagnostic error "-Wmissing-field-initializers"  // an entry that was forgotten

template <typename S>
constexpr Products<AccumulatorOf<S>> kProducts = {
    .packed_size = packed_size<S>,
    .pack = pack<S>,
    .gemm = gemm<S>,
    .outer_scratch = outer_scratch<S>,
    .outer_gemm = outer_gemm<S>,
};

// There is but one of doubles.
template <typename T>
const Products<T>& products(Precision precision) {
  if constexpr (sizeof(T) == sizeof(float)) {
    switch (precision) {
      case Precision::kSame:
        return kProducts<T>;
      case Precision::kBFloat16:
        return kProducts<BFloat16>;
      case Precision::kHalf:
        return kProducts<Half>;
    }
  }
  return kProducts<T>;
}

template <typename T>
constexpr Kernels<T> kTable = {
    .cell_forward = cell_forward<T>,
    .softmax_signal = softmax_signal<T>,
    .softmax_signal_backward = softmax_signal_backward<T>,
    .gold_arrives = gold_arrives<T>,
    .mixture_signal = mixture_signal<T>,
    .mixture_signal_backward = mixture_signal_backward<T>,
    .recode = recode<T>,
    .recode_backward = recode_backward<T>,
    .cell_backward = cell_backward<T>,
    .dropout_mask = dropout_mask<T>,
    .mask_rows = mask_rows<T>,
    .mask_sum = mask_sum<T>,
    .gate = gate<T>,
    .trial_step = trial_step<T>,
    .trial_verdict = trial_verdict<T>,
    .stream_scratch = stream_scratch<T>,
    .stream_decode = stream_decode<T>,
    .shared_decode = shared_decode<T>,
    .shared_decode_back = shared_decode_back<T>,
    .products = products<T>,
};

}  // namespace

#define FR_STRING(x) #x
#define FR_NAME(x) FR_STRING(x)
extern const CpuKernels cpu_kernels;
const CpuKernels cpu_kernels = {FR_NAME(FR_ISA), &kTable<float>, &kTable<double>};

}  // namespace FR_ISA
}  // namespace fused_recoder
