// How the kernels of the LSTM cell divide a row of hidden units: each thread works on four units at
// a time, which is one Philox call of dropout and one 16-byte load of floats.
#pragma once

#include "../kernels.h"
#include "vector.cuh"

namespace fused_recoder {
namespace cuda {

constexpr int kQuad = 4;

// Grid: x = rows, y = blocks that share a row. A kernel that sums over a row has one block for it.
struct UnitPlan {
  int threads, blocks_per_row;
};

constexpr int kUnitThreads = 64;      // of a block that shares its row: many blocks, many SMs
constexpr int kRowUnitThreads = 256;  // of a block with a row of its own
constexpr int kMostBlocksPerRow = 1024;
// Blocks per multiprocessor to leave registers for: without a number ptxas aims high and spills.
constexpr int kUnitBlocks = 1;

inline UnitPlan plan_units(int64_t units, bool sums_over_row) {
  const int64_t quads = (units + kQuad - 1) / kQuad, warps = (quads + 31) / 32;
  if (sums_over_row) {
    const int64_t most = kRowUnitThreads / 32;
    return {static_cast<int>(32 * (warps < most ? warps : most)), 1};
  }
  const int64_t most = kUnitThreads / 32, used = warps < most ? warps : most;
  const int64_t blocks = (warps + used - 1) / used;
  return {static_cast<int>(32 * used),
          static_cast<int>(blocks < kMostBlocksPerRow ? blocks : kMostBlocksPerRow)};
}

__device__ __forceinline__ int first_quad() {
  return kQuad * (blockIdx.y * blockDim.x + threadIdx.x);
}
__device__ __forceinline__ int quad_stride() { return kQuad * gridDim.y * blockDim.x; }

// Four units from `from` on, of which `count` (or more) exist; the others are 0. The row length
// and all pointers are multiples of kAlign elements, so that pieces of that size exist as a whole.
template <int kAlign, typename A, typename T>
__device__ __forceinline__ void load_quad(A (&to)[kQuad], const T* from, int count) {
#pragma unroll
  for (int i = 0; i < kQuad; i += kAlign) {
    if (i < count) {
      load<kAlign>(to + i, from + i);
    } else {
#pragma unroll
      for (int k = 0; k < kAlign; ++k) to[i + k] = A(0);
    }
  }
}

template <int kAlign, typename A, typename T>
__device__ __forceinline__ void store_quad(T* to, const A (&from)[kQuad], int count) {
#pragma unroll
  for (int i = 0; i < kQuad; i += kAlign)
    if (i < count) store<kAlign>(to + i, from + i);
}

template <int kAlign, typename T>
__device__ __forceinline__ void clear_quad(T* to, int count) {
  const float zeros[kQuad] = {0, 0, 0, 0};
  store_quad<kAlign>(to, zeros, count);
}

template <int kAlign, typename T>
__device__ __forceinline__ void copy_quad(T* to, const T* from, int count) {
  T quad[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; i += kAlign)
    if (i < count) {
      load<kAlign>(quad + i, from + i);
      store<kAlign>(to + i, quad + i);
    }
}

// The dropout factors of the quad that starts at `unit`; all 1 without dropout.
template <typename A>
__device__ __forceinline__ void dropout_factors(A (&factor)[kQuad], const Dropout& dropout,
                                                uint32_t time, uint32_t row, int unit,
                                                uint32_t sample = 0) {
  if (dropout.seed != nullptr) {
    dropout_quad<A>(dropout, time, sample, row, unit / kQuad, factor);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) factor[i] = A(1);
  }
}

// The largest of 4, 2, 1 that divides `units` and that all pointers (null ones aside) allow.
template <typename... T>
int common_alignment(int64_t units, const T*... pointers) {
  if (units % 4 == 0 && (is_aligned<4>(pointers) && ...)) return 4;
  if (units % 2 == 0 && (is_aligned<2>(pointers) && ...)) return 2;
  return 1;
}

// Calls body(constant) with the alignment as a compile-time constant.
template <typename Body>
void with_alignment(int alignment, const Body& body) {
  if (alignment == 4)
    body(Constant<4>());
  else if (alignment == 2)
    body(Constant<2>());
  else
    body(Constant<1>());
}

}  // namespace cuda
}  // namespace fused_recoder
