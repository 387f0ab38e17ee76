// Correct kernels of the kinds that detectors could be wrong about: nothing may be found in them.
// Launched like those of bugs.cuh.
#pragma once

#include "portable.cuh"

__global__ void reduction_in_a_loop(const float* in, float* out) {
  __shared__ float buffer[8];
  for (int round = 0; round < 4; ++round) {
    float value = in[round * 256 + threadIdx.x];
    for (int bits = 16; bits > 0; bits >>= 1) value += __shfl_xor_sync(~0u, value, bits);
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < 8; ++i) total += buffer[i];
    out[round * 256 + threadIdx.x] = total;
    __syncthreads();
  }
}

__global__ void neighbours_with_syncwarp(const float* in, float* out) {
  __shared__ float buffer[256];
  buffer[threadIdx.x] = in[threadIdx.x];
  __syncwarp();
  out[blockIdx.x * 256 + threadIdx.x] = buffer[threadIdx.x ^ 1];
}

__global__ void half_warps_with_exact_masks(const float* in, float* out) {
  const unsigned mask = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  float value = in[threadIdx.x];
  for (int bits = 8; bits > 0; bits >>= 1) value += __shfl_xor_sync(mask, value, bits);
  out[blockIdx.x * 256 + threadIdx.x] = value;
}

__global__ void compaction_by_ballot(const float* in, float* out) {
  const bool keep = in[threadIdx.x] > 50;
  const unsigned kept = __ballot_sync(~0u, keep);
  const unsigned before = kept & ((1u << threadIdx.x % 32) - 1);
  if (keep) out[blockIdx.x * 256 + threadIdx.x / 32 * 32 + __popc(before)] = in[threadIdx.x];
}

__global__ void atomics_between_blocks(const float* in, float* out) {
  atomicAdd(&out[threadIdx.x % 4], in[threadIdx.x]);
}

__global__ void reversal_in_dynamic_shared_memory(const float* in, float* out) {
  DYNAMIC_SHARED(float, buffer);
  buffer[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[blockIdx.x * 256 + threadIdx.x] = buffer[255 - threadIdx.x];
}

// The last block to finish adds up what all have left in memory. Without the fence it may read old
// values (a bug, listed as last_block_without_fence).
template <bool kFence>
__global__ void last_block_sums(const float* in, float* out) {
  __shared__ bool last;
  float* parts = out + 8;                                 // [gridDim.x]
  unsigned* finished = reinterpret_cast<unsigned*>(out);  // [1]
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = in[blockIdx.x];
    if (kFence) __threadfence();
    last = atomicAdd(finished, 1u) == gridDim.x - 1;
    if (kFence) __threadfence();
  }
  __syncthreads();
  if (last && threadIdx.x < 32) {
    float value = threadIdx.x < gridDim.x ? parts[threadIdx.x] : 0;
    for (int distance = 16; distance > 0; distance >>= 1)
      value += __shfl_down_sync(~0u, value, distance);
    if (threadIdx.x == 0) out[1] = value;
  }
}
