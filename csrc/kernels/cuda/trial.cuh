// Backtracking and the gate on CUDA. Structs and meaning: kernels/kernels.h.
#pragma once

#include "units.cuh"

namespace fused_recoder {
namespace cuda {

// Grid: x = rows, as in units.cuh.
template <typename S, int kAlign>
__global__ void __launch_bounds__(kUnitThreads) trial_step_kernel(const TrialStep<S> p) {
  using A = typename AccumulateIn<S>::type;
  const int H = static_cast<int>(p.hidden);
  const int64_t row = blockIdx.x, start = row * H;
  const A scale = p.row_scale != nullptr ? p.row_scale[row] : A(1);
  const A alpha = p.alpha[row];
  for (int j = first_quad(); j < H; j += quad_stride()) {
    const int count = H - j;
    A dh[kQuad], factor[kQuad], trial[kQuad];
    load_quad<kAlign>(dh, p.dh + start + j, count);
    dropout_factors(factor, p.dropout, p.time, row, j);
    if (p.recodes_h) {
      load_quad<kAlign>(trial, p.h + start + j, count);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) trial[k] -= alpha * (dh[k] * scale * factor[k]);
    } else {
      A o[kQuad], cell[kQuad];
      load_quad<kAlign>(o, p.gates + 4 * start + 3 * H + j, count);
      load_quad<kAlign>(cell, p.c + start + j, count);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        const A tanh_c = tanh(cell[k]);
        const A dc = dh[k] * scale * factor[k] * o[k] * (A(1) - tanh_c * tanh_c);
        trial[k] = o[k] * tanh(cell[k] - alpha * dc);
      }
    }
#pragma unroll
    for (int k = 0; k < kQuad; ++k) trial[k] *= factor[k];
    store_quad<kAlign>(p.trial + start + j, trial, count);
  }
}

constexpr int kScalarThreads = 128;  // of kernels that do one thing per row

__device__ __forceinline__ int64_t scalar_row() {
  return int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
}

inline unsigned scalar_blocks(int64_t rows, int threads) { return (rows + threads - 1) / threads; }

// Grid: x = blocks of rows.
template <typename A>
__global__ void __launch_bounds__(kScalarThreads) trial_verdict_kernel(const TrialVerdict<A> p) {
  const int64_t row = scalar_row();
  if (row >= p.rows || p.settled[row]) return;
  if (p.trial_delta[row] < p.delta[row]) {
    p.settled[row] = 1;
  } else {
    for (int64_t k = 0; k < p.samples; ++k) p.alpha[k * p.rows + row] *= p.shrink;
  }
}

template <typename A>
__global__ void __launch_bounds__(kScalarThreads) gate_kernel(const Gate<A> p) {
  const int64_t row = scalar_row();
  if (row >= p.rows) return;
  const bool open = (p.active == nullptr || p.active[row]) && p.delta[row] > *p.threshold;
  for (int64_t k = 0; k < p.samples; ++k) p.open[k * p.rows + row] = open;
}

template <typename S>
void launch_trial_step(cudaStream_t stream, const TrialStep<S>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  with_alignment(common_alignment(p.hidden, p.gates, p.c, p.h, p.dh, p.trial), [&](auto align) {
    constexpr int kAlign = decltype(align)::value;
    CUDA_LAUNCH(grid, plan.threads, 0, stream, trial_step_kernel<S, kAlign>)(p);
  });
}

template <typename S>
void trial_step(const Launch& launch, const TrialStep<S>& p) {
  launch_trial_step(static_cast<cudaStream_t>(launch.stream), p, plan_units(p.hidden, false));
}

template <typename A>
void trial_verdict(const Launch& launch, const TrialVerdict<A>& p) {
  CUDA_LAUNCH(scalar_blocks(p.rows, kScalarThreads), kScalarThreads, 0,
              static_cast<cudaStream_t>(launch.stream), trial_verdict_kernel<A>)
  (p);
}

template <typename A>
void gate(const Launch& launch, const Gate<A>& p) {
  CUDA_LAUNCH(scalar_blocks(p.rows, kScalarThreads), kScalarThreads, 0,
              static_cast<cudaStream_t>(launch.stream), gate_kernel<A>)
  (p);
}

}  // namespace cuda
}  // namespace fused_recoder
