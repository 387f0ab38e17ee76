// Masks that the whole batch shares, compacted on CUDA: lists of units, the columns of W and the
// states that belong to them, and the way back. Structs and meaning: kernels/kernels.h.
#pragma once

#include "reduce.cuh"
#include "units.cuh"

namespace fused_recoder {
namespace cuda {

constexpr int kListThreads = 128;

// The sum over the threads before this one in its warp, and over the whole warp. The last warp may
// have less than 32 lanes.
struct WarpSums {
  int before, all;
};

__device__ __forceinline__ WarpSums sum_warp_before(int value) {
  const int lane = threadIdx.x % 32;
  const int lanes = min(32, static_cast<int>(blockDim.x) - static_cast<int>(threadIdx.x) + lane);
  const unsigned mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_sync(mask, sum, lane >= distance ? lane - distance : lane);
    if (lane >= distance) sum += other;
  }
  return {sum - value, __shfl_sync(mask, sum, lanes - 1)};
}

// One list per block. Grid: x = steps * samples. A template only to have it compiled where it is
// used.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) list_units_kernel(const ListUnits p) {
  __shared__ int warp_counts[kMaxWarps];
  const int units = static_cast<int>(p.units), length = static_cast<int>(p.length);
  const uint32_t time = p.first_time + blockIdx.x / static_cast<uint32_t>(p.samples);
  const uint32_t sample = blockIdx.x % static_cast<uint32_t>(p.samples);
  int32_t* listed = p.listed + int64_t(blockIdx.x) * length;  // [length]
  int32_t* place = p.place + int64_t(blockIdx.x) * units;     // [H]
  const int warp = threadIdx.x / 32, round = kQuad * blockDim.x;
  int count = 0;  // listed so far, the same in all threads
  for (int start = 0; start < units; start += round) {
    const int unit = start + kQuad * threadIdx.x;
    float factor[kQuad];
    dropout_factors(factor, p.dropout, time, 0, unit, sample);
    int own = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) own += unit + i < units && (factor[i] == 0) == p.dropped;
    const WarpSums sums = sum_warp_before(own);
    if (threadIdx.x % 32 == 0) warp_counts[warp] = sums.all;
    __syncthreads();
    int next = count + sums.before;
    for (int w = 0; w < warp_count(); ++w) {
      if (w < warp) next += warp_counts[w];
      count += warp_counts[w];
    }
    DEVICE_ASSERT(count <= length && "a shared mask lists more units than were made room for");
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (unit + i >= units) break;
      const bool is_listed = (factor[i] == 0) == p.dropped;
      place[unit + i] = is_listed ? next : -1;
      if (is_listed) listed[next++] = unit + i;
    }
    __syncthreads();  // warp_counts are used again
  }
  for (int i = count + threadIdx.x; i < length; i += blockDim.x) listed[i] = -1;
}

// Grid: x = samples * rows (their listed states), then samples * length (columns of W).
template <typename S, int kAlign>
__global__ void __launch_bounds__(kUnitThreads) gather_units_kernel(const GatherUnits<S> p) {
  using A = typename AccumulateIn<S>::type;
  const int64_t states = p.samples * p.rows;
  if (blockIdx.x < states) {
    const int64_t sample = blockIdx.x / p.rows, row = blockIdx.x % p.rows;
    const int32_t* listed = p.listed + sample * p.length;  // [length]
    const S* h = p.h + row * p.hidden;                     // [H]
    S* out = p.listed_h + blockIdx.x * p.length;           // [length]
    const A factor = static_cast<A>(p.factor);
    for (int64_t i = int64_t(blockIdx.y) * blockDim.x + threadIdx.x; i < p.length;
         i += int64_t(gridDim.y) * blockDim.x) {
      const int unit = listed[i];
      A value[1] = {0};
      if (unit >= 0) load<1>(value, h + unit);
      value[0] *= factor;
      store<1>(out + i, value);
    }
    return;
  }
  const int64_t column = blockIdx.x - states;  // of samples * length
  const int unit = p.listed[column];
  const int vocab = static_cast<int>(p.vocab);
  S* out = p.columns + column * vocab;  // [V]
  for (int j = first_quad(); j < vocab; j += quad_stride()) {
    if (unit < 0)
      clear_quad<kAlign>(out + j, vocab - j);
    else
      copy_quad<kAlign>(out + j, p.weight_t + int64_t(unit) * vocab + j, vocab - j);
  }
}

// Grid: x = rows, y = blocks of units.
template <typename A>
__global__ void __launch_bounds__(kUnitThreads) scatter_units_kernel(const ScatterUnits<A> p) {
  const int H = static_cast<int>(p.hidden);
  const int64_t row = blockIdx.x;
  for (int j = blockIdx.y * blockDim.x + threadIdx.x; j < H; j += gridDim.y * blockDim.x) {
    A sum = A(0);
    for (int64_t sample = 0; sample < p.samples; ++sample) {
      const int place = p.place[sample * H + j];
      A back[1] = {0};
      if (place >= 0) load<1>(back, p.back + (sample * p.rows + row) * p.length + place);
      sum += back[0];
    }
    A dh[1] = {0};
    if (p.base_factor != 0) load<1>(dh, p.dh + row * H + j);
    dh[0] = static_cast<A>(p.base_factor) * dh[0] + static_cast<A>(p.factor) * sum;
    store<1>(p.dh + row * H + j, dh);
  }
}

inline void launch_list_units(cudaStream_t stream, const ListUnits& p, int threads) {
  CUDA_LAUNCH(p.steps * p.samples, threads, 0, stream, list_units_kernel<kListThreads>)(p);
}

template <typename S>
void launch_gather_units(cudaStream_t stream, const GatherUnits<S>& p, UnitPlan plan) {
  const int64_t columns = p.columns != nullptr ? p.length : 0;
  const dim3 grid(p.samples * (p.rows + columns), plan.blocks_per_row);
  with_alignment(common_alignment(p.vocab, p.weight_t, p.columns), [&](auto align) {
    constexpr int kAlign = decltype(align)::value;
    CUDA_LAUNCH(grid, plan.threads, 0, stream, gather_units_kernel<S, kAlign>)(p);
  });
}

template <typename A>
void launch_scatter_units(cudaStream_t stream, const ScatterUnits<A>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  CUDA_LAUNCH(grid, plan.threads, 0, stream, scatter_units_kernel<A>)(p);
}

inline void list_units(const Launch& launch, const ListUnits& p) {
  launch_list_units(static_cast<cudaStream_t>(launch.stream), p, kListThreads);
}

template <typename S>
void gather_units(const Launch& launch, const GatherUnits<S>& p) {
  const int64_t longest = p.columns != nullptr ? p.vocab : kQuad * p.length;
  launch_gather_units(static_cast<cudaStream_t>(launch.stream), p, plan_units(longest, false));
}

// Nothing of it is stored in S: one kernel serves all storage types with the same A.
template <typename S>
void scatter_units(const Launch& launch, const ScatterUnits<S>& p) {
  using A = typename AccumulateIn<S>::type;
  const ScatterUnits<A> same{p.samples, p.rows,   p.hidden,      p.length, p.place,
                             p.back,    p.factor, p.base_factor, p.dh};
  launch_scatter_units(static_cast<cudaStream_t>(launch.stream), same,
                       plan_units(kQuad * p.hidden, false));
}

}  // namespace cuda
}  // namespace fused_recoder
