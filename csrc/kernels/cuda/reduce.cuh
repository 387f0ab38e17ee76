// Sums over the threads of a block, always in the same order: no atomics, so that a result can be
// repeated bit for bit. Blocks may have any number of threads up to kMaxWarps * 32.
#pragma once

#include "portable.cuh"

namespace fused_recoder {
namespace cuda {

constexpr int kMaxWarps = 16;

__device__ __forceinline__ int warp_count() { return (blockDim.x + 31) / 32; }

// Combines the values of a warp; the result is in its lane 0. The last warp of a block may have
// less than 32 lanes: the mask names those that exist.
template <typename T, typename Combine>
__device__ __forceinline__ T reduce_warp(T value, Combine combine) {
  const int lane = threadIdx.x % 32;
  const int lanes = min(32, static_cast<int>(blockDim.x) - static_cast<int>(threadIdx.x) + lane);
  const unsigned mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const bool exists = lane + distance < lanes;
    const T other = __shfl_sync(mask, value, exists ? lane + distance : lane);
    if (exists) value = combine(value, other);
  }
  return value;
}

struct Add {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// The sum over the block in thread 0. Within a warp in T, across warps in double: what the host
// does with blocks of a row. `slots` [kMaxWarps] is shared memory that nobody else uses between the
// barriers before and after.
template <typename T>
__device__ __forceinline__ double sum_block(T value, T* slots) {
  value = reduce_warp(value, Add());
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < warp_count(); ++warp) total += slots[warp];
  return total;
}

}  // namespace cuda
}  // namespace fused_recoder
