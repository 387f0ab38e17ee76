// Loads and stores of several neighbouring elements at once, converting between the storage type S
// and the accumulation type A on the way.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "portable.cuh"

namespace fused_recoder {
namespace cuda {

// A number that a function gets at compile time, as an argument.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

constexpr int kVectorBytes = 16;  // the widest load of all architectures

template <typename T, int N>
constexpr int kAlignment = N * sizeof(T) < kVectorBytes ? N * sizeof(T) : kVectorBytes;

template <typename T, int N>
struct alignas(kAlignment<T, N>) Pack {
  T at[N];
};

// By name, because PyTorch's flags for nvcc take the conversion operators away.
template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
  return static_cast<To>(value);
}
template <>
__device__ __forceinline__ float convert(__half value) {
  return __half2float(value);
}
template <>
__device__ __forceinline__ __half convert(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ float convert(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 convert(float value) {
  return __float2bfloat16_rn(value);
}

// `from` is aligned to kAlignment<T, N>.
template <int N, typename A, typename T>
__device__ __forceinline__ void load(A* to, const T* from) {
  COUNT_BYTES(sizeof(Pack<T, N>));
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = convert<A>(pack.at[i]);
}

template <int N, typename T, typename A>
__device__ __forceinline__ void store(T* to, const A* from) {
  COUNT_BYTES(sizeof(Pack<T, N>));
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = convert<T>(from[i]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

template <int N, typename T>
bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kAlignment<T, N> == 0;
}

}  // namespace cuda
}  // namespace fused_recoder
