// Theoretical occupancy, by the formulas of the toolkit's cuda_occupancy.h. Reads lines of
// "registers threads shared_bytes"; prints the resident blocks per multiprocessor on each device.
// Compiled and called by gpu_tables.py.
#include <cuda_occupancy.h>

#include <cstdio>

namespace {

constexpr size_t kKilobyte = 1024;

// "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide; numbers of
// multiprocessors from NVIDIA's architecture whitepapers (A100, H100 SXM5, GeForce RTX 4090).
cudaOccDeviceProp device(int major, int minor, int processors, int threads, size_t shared_kilobytes,
                         size_t shared_per_block_kilobytes) {
  cudaOccDeviceProp p;
  p.computeMajor = major;
  p.computeMinor = minor;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiprocessor = threads;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = 32;
  p.sharedMemPerBlock = 48 * kKilobyte;
  p.sharedMemPerMultiprocessor = shared_kilobytes * kKilobyte;
  p.numSms = processors;
  p.sharedMemPerBlockOptin = shared_per_block_kilobytes * kKilobyte;
  p.reservedSharedMemPerBlock = kKilobyte;
  return p;
}

}  // namespace

int main() {
  const cudaOccDeviceProp devices[] = {device(8, 0, 108, 2048, 164, 163),  // A100
                                       device(9, 0, 132, 2048, 228, 227),  // H100 SXM5
                                       device(8, 9, 128, 1536, 100, 99)};  // RTX 4090
  int registers, threads, shared_bytes;
  while (scanf("%d %d %d", &registers, &threads, &shared_bytes) == 3) {
    for (const cudaOccDeviceProp& properties : devices) {
      cudaOccFuncAttributes kernel;
      kernel.maxThreadsPerBlock = 1024;
      kernel.numRegs = registers;
      kernel.sharedSizeBytes = shared_bytes;
      kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
      kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_DEFAULT;
      kernel.maxDynamicSharedSizeBytes = 0;
      kernel.numBlockBarriers = 1;
      const cudaOccDeviceState state;
      cudaOccResult result;
      if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &properties, &kernel, &state, threads,
                                                  0) != CUDA_OCC_SUCCESS)
        return 1;
      printf("%d ", result.activeBlocksPerMultiprocessor);
    }
    printf("\n");
  }
}
