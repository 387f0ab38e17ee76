// What g++ sees in place of the CUDA language: qualifiers, built-in variables, launches.
// Included by csrc/kernels/cuda/portable.cuh; README.md in this folder tells the rules for kernels.
#pragma once

#include <cuda_runtime_api.h>  // cudaStream_t and the vector types, from the toolkit's host side
#include <device_launch_parameters.h>

#include <cmath>
#include <cstdint>
#include <typeinfo>

#include "intrinsics.h"
#include "scheduler.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
// Internal linkage: AddressSanitizer guards the __shared__ arrays of such functions only.
#define __global__ static __attribute__((unused))
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
// Fresh for every block, as far as the sanitizers allow it.
#if defined(EMU_TSAN)
#define __shared__ static thread_local  // every block runs on a thread of its own
#elif defined(__SANITIZE_ADDRESS__)
#define __shared__ static  // variables in sections of our own would not be guarded
#else
#define __shared__ static __attribute__((section("emu_shared")))  // filled with NaNs
#endif

#define threadIdx (::emu::thread_index)
#define blockIdx (::emu::block_index)
#define blockDim (::emu::block_shape)
#define gridDim (::emu::grid_shape)

#define CUDA_LAUNCH(grid, block, shared_bytes, stream, ...) \
  ::emu::bind_launch<__VA_ARGS__>(grid, block, shared_bytes)
#define DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::emu::dynamic_shared)
#define DEVICE_ASSERT(condition) \
  ((condition) ? void() : ::emu::assertion_failed(#condition, {__FILE__, __LINE__}))

#ifdef EMU_TSAN
#define COUNT_BYTES(bytes)  // would be a race itself
#else
#define COUNT_BYTES(bytes) (::emu::bytes_moved += (bytes))
#endif

namespace emu {

// Carries the name of a kernel in its own.
template <auto kKernel>
struct NameOf;

template <auto kKernel>
struct BoundLaunch;

template <typename... Parameter, void (*kKernel)(Parameter...)>
struct BoundLaunch<kKernel> {
  dim3 grid, block;
  size_t shared_bytes;
  void operator()(std::common_type_t<Parameter>... value) const {
    launch({grid,
            block,
            shared_bytes,
            typeid(NameOf<kKernel>*).name(),
            {{&value, sizeof(value)}...},
            [&] { kKernel(value...); }});
  }
};

template <auto kKernel>
BoundLaunch<kKernel> bind_launch(dim3 grid, dim3 block, size_t shared_bytes) {
  return {grid, block, shared_bytes};
}

}  // namespace emu
