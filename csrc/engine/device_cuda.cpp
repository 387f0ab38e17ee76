// CUDA's backend. Compiled only where the extension is built with CUDA (setup.py).
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include "../kernels/cuda/tables.h"
#include "device.h"

namespace fused_recoder {
namespace {

void* current_stream(int device) {
  return at::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

void check() { C10_CUDA_CHECK(cudaGetLastError()); }

const bool kRegistered = [] {
  set_backend(c10::kCUDA, {.f32 = cuda_kernels.f32,
                           .f64 = cuda_kernels.f64,
                           .host_reads = false,
                           .launches_cost = true,
                           .current_stream = current_stream,
                           .check_launches = check});
  return true;
}();

}  // namespace
}  // namespace fused_recoder
