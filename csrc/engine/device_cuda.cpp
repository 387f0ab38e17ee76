// CUDA's backend. Compiled only where the extension is built with CUDA (setup.py).
// Of PyTorch's CUDA only c10: the headers of ATen's want those of cuBLAS and cuSPARSE, too, which not
// every toolkit has.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "../kernels/cuda/tables.h"
#include "device.h"

namespace fused_recoder {
namespace {

void* current_stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

void check() { C10_CUDA_CHECK(cudaGetLastError()); }

const bool kRegistered = [] {
  set_backend(c10::kCUDA,
              {cuda_kernels.f32, cuda_kernels.f64, /*host_reads=*/false, current_stream, check});
  return true;
}();

}  // namespace
}  // namespace fused_recoder
