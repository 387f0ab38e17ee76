// Kernels with one bug each, to show that the shim and the sanitizers find it. All are launched
// with blocks of 256 threads and 256 floats of dynamic shared memory (test_detectors.cpp);
// in [1024], out [1024].
#pragma once

#include "portable.cuh"

__global__ void missing_barrier(const float* in, float* out) {
  __shared__ float buffer[256];
  buffer[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = buffer[255 - threadIdx.x];
}

// The next round may overwrite what a slow thread still reads.
__global__ void missing_barrier_at_loop_end(const float* in, float* out) {
  __shared__ float buffer[8];
  for (int round = 0; round < 4; ++round) {
    float value = in[round * 256 + threadIdx.x];
    for (int bits = 16; bits > 0; bits >>= 1) value += __shfl_xor_sync(~0u, value, bits);
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < 8; ++i) total += buffer[i];
    out[round * 256 + threadIdx.x] = total;
  }
}

__global__ void missing_syncwarp(const float* in, float* out) {
  __shared__ float buffer[256];
  buffer[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = buffer[threadIdx.x ^ 1];
}

__global__ void shuffle_taken_for_a_fence(const float* in, float* out) {
  __shared__ float buffer[256];
  buffer[threadIdx.x] = in[threadIdx.x];
  const float other = __shfl_xor_sync(~0u, in[threadIdx.x], 1);
  out[threadIdx.x] = buffer[threadIdx.x ^ 1] + 0 * other;
}

__global__ void barrier_in_a_branch(const float* in, float* out) {
  __shared__ float buffer[256];
  buffer[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x < 100) __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x];
}

__global__ void two_barriers_in_branches(const float* in, float* out) {
  if (threadIdx.x < 128)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void exit_before_a_barrier(const float* in, float* out) {
  if (threadIdx.x >= 200) return;
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

// Half a warp names the whole warp, the other half waits elsewhere.
__global__ void mask_names_absent_lanes(const float* in, float* out) {
  float value = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) value += __shfl_xor_sync(~0u, value, 1);
  __syncthreads();
  out[threadIdx.x] = value;
}

__global__ void mask_names_exited_lanes(const float* in, float* out) {
  if (threadIdx.x % 32 >= 16) return;
  out[threadIdx.x] = __shfl_xor_sync(~0u, in[threadIdx.x], 1);
}

__global__ void mask_without_the_caller(const float* in, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(0xfffffffeu, in[threadIdx.x], 2);
}

__global__ void shuffle_from_outside_the_mask(const float* in, float* out) {
  float value = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) value += __shfl_xor_sync(0x0000ffffu, value, 16);
  out[threadIdx.x] = value;
}

__global__ void beyond_global_memory(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x + 1023];
}

__global__ void beyond_dynamic_shared_memory(const float* in, float* out) {
  DYNAMIC_SHARED(float, buffer);
  buffer[threadIdx.x + 1] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x + 1];
}

__global__ void beyond_static_shared_memory(const float* in, float* out) {
  __shared__ float buffer[256];
  float* shifted = buffer + 1;
  shifted[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = shifted[threadIdx.x];
}

__global__ void uninitialised_static_shared_memory(const float* in, float* out) {
  __shared__ float buffer[256];
  if (threadIdx.x < 128) buffer[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x];
}

__global__ void uninitialised_dynamic_shared_memory(const float* in, float* out) {
  DYNAMIC_SHARED(float, buffer);
  if (threadIdx.x < 128) buffer[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x];
}

__global__ void misaligned_vector_load(const float* in, float* out) {
  const float4 four = *reinterpret_cast<const float4*>(in + 1 + threadIdx.x);
  out[threadIdx.x] = four.x + four.y + four.z + four.w;
}

__global__ void blocks_share_a_counter(const float* in, float* out) {
  if (threadIdx.x == 0) out[0] = out[0] + in[blockIdx.x];
}

__global__ void block_reads_another_block(const float* in, float* out) {
  if (blockIdx.x == 0)
    out[threadIdx.x] = in[threadIdx.x];
  else
    out[256 + threadIdx.x] = out[threadIdx.x];
}

__global__ void failing_assert(const float* in, float* out) {
  DEVICE_ASSERT(in[threadIdx.x] < 90);
  out[threadIdx.x] = in[threadIdx.x];
}
