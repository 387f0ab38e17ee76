// CUDA's kernel tables, one per storage type. For host code: the engine and the tests.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../kernels.h"

namespace fused_recoder {

struct CudaKernels {
  const Kernels<float>* f32;
  const Kernels<double>* f64;
  const Kernels<__half>* f16;
  const Kernels<__nv_bfloat16>* bf16;
};

extern const CudaKernels cuda_kernels;

}  // namespace fused_recoder
