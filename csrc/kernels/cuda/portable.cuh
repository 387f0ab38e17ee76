// The only spellings that a kernel uses instead of raw CUDA, so that one source is compiled by nvcc
// for GPUs and by g++ for the tests, which run it on the CPU (tests/emu).
#pragma once

#ifdef __CUDACC__

#include <cuda_runtime.h>

// Device asserts guard against targets that are out of range: release builds need them too.
#undef NDEBUG
#include <assert.h>

// CUDA_LAUNCH(grid, block, shared_bytes, stream, kernel<Arguments...>)(parameters...)
#define CUDA_LAUNCH(grid, block, shared_bytes, stream, ...) \
  __VA_ARGS__<<<(grid), (block), (shared_bytes), (stream)>>>

// Declares `T* name`, the dynamic shared memory of the block.
#define DYNAMIC_SHARED(T, name)                                       \
  extern __shared__ __align__(16) unsigned char dynamic_shared_raw[]; \
  T* const name = reinterpret_cast<T*>(dynamic_shared_raw)

#define DEVICE_ASSERT(condition) assert(condition)

#define COUNT_BYTES(bytes)  // read from or written to global memory: counted by the tests

#else

#include "cuda_emu.h"  // in tests/emu

#endif
