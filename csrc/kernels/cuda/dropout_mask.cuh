// Dropout masks on CUDA, bit for bit those of the CPU: both call philox() of kernels/math.h.
#pragma once

#include "units.cuh"

namespace fused_recoder {
namespace cuda {

// Grid as in units.cuh.
template <typename A>
__global__ void __launch_bounds__(kUnitThreads) dropout_mask_kernel(const DropoutMask<A> p) {
  const int units = static_cast<int>(p.units);
  const int64_t row = blockIdx.x;
  for (int j = first_quad(); j < units; j += quad_stride()) {
    A factor[kQuad];
    dropout_quad<A>(p.dropout, p.time, p.sample, row, j / kQuad, factor);
    store_quad<1>(p.out + row * units + j, factor, units - j);
  }
}

template <typename A>
void launch_dropout_mask(cudaStream_t stream, const DropoutMask<A>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  CUDA_LAUNCH(grid, plan.threads, 0, stream, dropout_mask_kernel<A>)(p);
}

template <typename A>
void dropout_mask(const Launch& launch, const DropoutMask<A>& p) {
  launch_dropout_mask(static_cast<cudaStream_t>(launch.stream), p, plan_units(p.units, false));
}

}  // namespace cuda
}  // namespace fused_recoder
