// Rows under dropout masks on CUDA, and back. Structs and meaning: kernels/kernels.h; how rows are
// divided: units.cuh.
#pragma once

#include "units.cuh"

namespace fused_recoder {
namespace cuda {

// Grid: x = samples * rows.
template <typename S, int kAlign>
__global__ void __launch_bounds__(kUnitThreads) mask_rows_kernel(const MaskRows<S> p) {
  using A = typename AccumulateIn<S>::type;
  const int units = static_cast<int>(p.units);
  const uint32_t sample = blockIdx.x / static_cast<uint32_t>(p.rows);
  const uint32_t row = blockIdx.x % static_cast<uint32_t>(p.rows);
  const S* in = p.in + int64_t(row) * units;     // [units]
  S* out = p.out + int64_t(blockIdx.x) * units;  // [units], may be `in`
  for (int j = first_quad(); j < units; j += quad_stride()) {
    A value[kQuad], factor[kQuad];
    load_quad<kAlign>(value, in + j, units - j);
    dropout_factors(factor, p.dropout, p.time, p.first_row + (p.shared ? 0 : row), j,
                    p.first_sample + sample);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) value[k] *= factor[k];
    store_quad<kAlign>(out + j, value, units - j);
  }
}

// Grid: x = rows.
template <typename A, int kAlign>
__global__ void __launch_bounds__(kUnitThreads) mask_sum_kernel(const MaskSum<A> p) {
  const int units = static_cast<int>(p.units);
  const int64_t row = blockIdx.x;
  for (int j = first_quad(); j < units; j += quad_stride()) {
    A sum[kQuad] = {0, 0, 0, 0};
    for (int64_t sample = 0; sample < p.samples; ++sample) {
      A value[kQuad], factor[kQuad];
      load_quad<kAlign>(value, p.in + (sample * p.rows + row) * units + j, units - j);
      dropout_factors(factor, p.dropout, p.time, p.first_row + (p.shared ? 0 : row), j, sample);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) sum[k] += value[k] * factor[k];
    }
    store_quad<kAlign>(p.out + row * units + j, sum, units - j);
  }
}

template <typename S>
void launch_mask_rows(cudaStream_t stream, const MaskRows<S>& p, UnitPlan plan) {
  const dim3 grid(p.samples * p.rows, plan.blocks_per_row);
  with_alignment(common_alignment(p.units, p.in, p.out), [&](auto align) {
    constexpr int kAlign = decltype(align)::value;
    CUDA_LAUNCH(grid, plan.threads, 0, stream, mask_rows_kernel<S, kAlign>)(p);
  });
}

template <typename A>
void launch_mask_sum(cudaStream_t stream, const MaskSum<A>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  with_alignment(common_alignment(p.units, p.in, p.out), [&](auto align) {
    constexpr int kAlign = decltype(align)::value;
    CUDA_LAUNCH(grid, plan.threads, 0, stream, mask_sum_kernel<A, kAlign>)(p);
  });
}

template <typename S>
void mask_rows(const Launch& launch, const MaskRows<S>& p) {
  launch_mask_rows(static_cast<cudaStream_t>(launch.stream), p, plan_units(p.units, false));
}

// Nothing of it is stored in S: one kernel serves all storage types with the same A.
template <typename S>
void mask_sum(const Launch& launch, const MaskSum<S>& p) {
  using A = typename AccumulateIn<S>::type;
  const MaskSum<A> same{p.samples,   p.rows,   p.units, p.dropout, p.time,
                        p.first_row, p.shared, p.in,    p.out};
  launch_mask_sum(static_cast<cudaStream_t>(launch.stream), same, plan_units(p.units, false));
}

}  // namespace cuda
}  // namespace fused_recoder
