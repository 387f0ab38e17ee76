// Kernels for check_instructions.cpp: instructions that the project's kernels do not have yet, and
// patterns whose counts are known.
#include <cstdint>

#define SHARED_ADDRESS(pointer) static_cast<uint32_t>(__cvta_generic_to_shared(pointer))

extern "C" {

// out [6,n]
__global__ void approximate(const float* in, float* out, int n) {
  const int i = threadIdx.x;
  if (i >= n) return;
  const float a = in[i];
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out[i]) : "f"(a));
  asm("ex2.approx.f32 %0, %1;" : "=f"(out[n + i]) : "f"(a));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out[2 * n + i]) : "f"(a));
  asm("lg2.approx.f32 %0, %1;" : "=f"(out[3 * n + i]) : "f"(a));
  asm("tanh.approx.f32 %0, %1;" : "=f"(out[4 * n + i]) : "f"(a));
  asm("div.approx.f32 %0, %1, %2;" : "=f"(out[5 * n + i]) : "f"(3.0f), "f"(a));
}

__global__ void approximate_in_double(const double* in, double* out, int n) {
  const int i = threadIdx.x;
  if (i < n) asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(out[i]) : "d"(in[i]));
}
}

// d = a b + c through shared memory, as a kernel would: a [16,16], b [8,16] (columns), c, d [16,8].
template <bool kHalf>
__device__ void multiply(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  __shared__ __align__(16) uint16_t tile_a[16 * 16], tile_b[8 * 16];
  const int lane = threadIdx.x, group = lane / 4, pair = 2 * (lane % 4);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SHARED_ADDRESS(tile_a + 8 * lane)),
               "l"(a + 8 * lane)
               : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (lane < 16)
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(SHARED_ADDRESS(tile_b + 8 * lane)),
        "l"(b + 8 * lane)
        : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  uint32_t of_a[4], of_b[2];
  float of_c[4], of_d[4];
  const uint16_t* const row_a = tile_a + 16 * (lane % 16) + 8 * (lane / 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(of_a[0]), "=r"(of_a[1]), "=r"(of_a[2]), "=r"(of_a[3])
               : "r"(SHARED_ADDRESS(row_a))
               : "memory");
  const uint16_t* const row_b = tile_b + 16 * (lane % 8) + 8 * (lane / 8 % 2);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(of_b[0]), "=r"(of_b[1])
               : "r"(SHARED_ADDRESS(row_b))
               : "memory");
  for (int i = 0; i < 4; ++i) of_c[i] = c[8 * (group + 8 * (i / 2)) + pair + i % 2];
  if (kHalf)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(of_d[0]), "=f"(of_d[1]), "=f"(of_d[2]), "=f"(of_d[3])
        : "r"(of_a[0]), "r"(of_a[1]), "r"(of_a[2]), "r"(of_a[3]), "r"(of_b[0]), "r"(of_b[1]),
          "f"(of_c[0]), "f"(of_c[1]), "f"(of_c[2]), "f"(of_c[3]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(of_d[0]), "=f"(of_d[1]), "=f"(of_d[2]), "=f"(of_d[3])
        : "r"(of_a[0]), "r"(of_a[1]), "r"(of_a[2]), "r"(of_a[3]), "r"(of_b[0]), "r"(of_b[1]),
          "f"(of_c[0]), "f"(of_c[1]), "f"(of_c[2]), "f"(of_c[3]));
  for (int i = 0; i < 4; ++i) d[8 * (group + 8 * (i / 2)) + pair + i % 2] = of_d[i];
}

extern "C" {

__global__ void multiply_half(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  multiply<true>(a, b, c, d);
}

__global__ void multiply_bfloat16(const uint16_t* a, const uint16_t* b, const float* c, float* d) {
  multiply<false>(a, b, c, d);
}

// a [16,8], b [8,8] (columns), c, d [16,8]
__global__ void multiply_tf32(const float* a, const float* b, const float* c, float* d) {
  const int lane = threadIdx.x, group = lane / 4, own = lane % 4;
  uint32_t of_a[4], of_b[2];
  float of_c[4], of_d[4];
  for (int i = 0; i < 4; ++i) {
    const float value = a[8 * (group + 8 * (i % 2)) + own + 4 * (i / 2)];
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(of_a[i]) : "f"(value));
    of_c[i] = c[8 * (group + 8 * (i / 2)) + 2 * own + i % 2];
  }
  for (int i = 0; i < 2; ++i)
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(of_b[i]) : "f"(b[8 * group + own + 4 * i]));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(of_d[0]), "=f"(of_d[1]), "=f"(of_d[2]), "=f"(of_d[3])
      : "r"(of_a[0]), "r"(of_a[1]), "r"(of_a[2]), "r"(of_a[3]), "r"(of_b[0]), "r"(of_b[1]),
        "f"(of_c[0]), "f"(of_c[1]), "f"(of_c[2]), "f"(of_c[3]));
  for (int i = 0; i < 4; ++i) d[8 * (group + 8 * (i / 2)) + 2 * own + i % 2] = of_d[i];
}

#define MULTIPLY_SHORT(type)                                                                       \
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type                               \
               ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"                         \
               : "=f"(of_d[0]), "=f"(of_d[1]), "=f"(of_d[2]), "=f"(of_d[3])                        \
               : "r"(pairs_a[(8 * group + pair) / 2]), "r"(pairs_a[(8 * (group + 8) + pair) / 2]), \
                 "r"(pairs_b[(8 * group + pair) / 2]), "f"(of_c[0]), "f"(of_c[1]), "f"(of_c[2]),   \
                 "f"(of_c[3]))

// a [16,8], b [8,8] (columns), c, d [16,8]; fragments taken from memory by the ISA's formulas
__global__ void multiply_short(const uint16_t* a, const uint16_t* b, const float* c, float* d,
                               int half) {
  const int lane = threadIdx.x, group = lane / 4, pair = 2 * (lane % 4);
  const auto* const pairs_a = reinterpret_cast<const uint32_t*>(a);
  const auto* const pairs_b = reinterpret_cast<const uint32_t*>(b);
  float of_c[4], of_d[4];
  for (int i = 0; i < 4; ++i) of_c[i] = c[8 * (group + 8 * (i / 2)) + pair + i % 2];
  if (half)
    MULTIPLY_SHORT("f16");
  else
    MULTIPLY_SHORT("bf16");
  for (int i = 0; i < 4; ++i) d[8 * (group + 8 * (i / 2)) + pair + i % 2] = of_d[i];
}

// in [4,8,8], out [7,8,8]: the first, the first two, all four
__global__ void transpose(const uint16_t* in, uint16_t* out) {
  __shared__ __align__(16) uint16_t tile[4 * 64];
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) tile[32 * i + lane] = in[32 * i + lane];
  __syncwarp();
  const uint32_t row = SHARED_ADDRESS(tile + 8 * lane);
  uint32_t pairs[7];
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(pairs[0])
               : "r"(row)
               : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(pairs[1]), "=r"(pairs[2])
               : "r"(row)
               : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[3]), "=r"(pairs[4]), "=r"(pairs[5]), "=r"(pairs[6])
               : "r"(row)
               : "memory");
  for (int i = 0; i < 7; ++i) reinterpret_cast<uint32_t*>(out)[32 * i + lane] = pairs[i];
}

// The first `count` of each thread's 16 bytes.
__global__ void copy_partly(const float* in, float* out, int count) {
  __shared__ __align__(16) float buffer[128];
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   SHARED_ADDRESS(buffer + 4 * threadIdx.x)),
               "l"(in + 4 * threadIdx.x), "r"(count)
               : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = buffer[4 * threadIdx.x + i];
}

// ---- Bugs ---------------------------------------------------------------------------------------

__global__ void copy_not_awaited(const float* in, float* out) {
  __shared__ __align__(16) float buffer[128];
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SHARED_ADDRESS(buffer + 4 * threadIdx.x)),
      "l"(in + 4 * threadIdx.x)
      : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x];
}

// Waiting is for the thread's own copies.
__global__ void copy_without_barrier(const float* in, float* out) {
  __shared__ float buffer[32];
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SHARED_ADDRESS(buffer + threadIdx.x)),
      "l"(in + threadIdx.x)
      : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  out[threadIdx.x] = buffer[threadIdx.x ^ 1];
}

// The next copy starts while others still read the last one.
__global__ void copy_into_what_is_read(const float* in, float* out) {
  __shared__ float buffer[32];
  for (int round = 0; round < 2; ++round) {
    asm volatile(
        "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SHARED_ADDRESS(buffer + threadIdx.x)),
        "l"(in + 32 * round + threadIdx.x)
        : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    out[32 * round + threadIdx.x] = buffer[threadIdx.x ^ 1];
  }
}

__global__ void misaligned_row(const float* in, uint32_t* out) {
  __shared__ __align__(16) float buffer[64];
  buffer[threadIdx.x] = in[threadIdx.x], buffer[threadIdx.x + 32] = 0;
  __syncwarp();
  uint32_t pair;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(pair)
               : "r"(SHARED_ADDRESS(buffer + 2 * (threadIdx.x % 8)))
               : "memory");
  out[threadIdx.x] = pair;
}

__global__ void matrix_without_half_a_warp(const float* in, uint32_t* out) {
  __shared__ __align__(16) float buffer[32];
  buffer[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  uint32_t pair = 0;
  if (threadIdx.x < 16)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(pair)
                 : "r"(SHARED_ADDRESS(buffer + 4 * (threadIdx.x % 8)))
                 : "memory");
  out[threadIdx.x] = pair;
}

__global__ void matrix_read_without_sync(const float* in, uint32_t* out) {
  __shared__ __align__(16) float buffer[32];
  buffer[31 - threadIdx.x] = in[threadIdx.x];
  uint32_t pair;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(pair)
               : "r"(SHARED_ADDRESS(buffer + 4 * (threadIdx.x % 8)))
               : "memory");
  out[threadIdx.x] = pair;
}

__global__ void divides_by_zero(const int* in, int* out) {
  out[threadIdx.x] = 100 / in[threadIdx.x];
}

__global__ void __launch_bounds__(64) for_64_threads(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];
}

// ---- Counts -------------------------------------------------------------------------------------

// One load and one store per warp, `stride` elements apart.
__global__ void strided(const float* in, float* out, int stride) {
  out[threadIdx.x] = in[stride * threadIdx.x];
}

// One store to shared memory per warp (nvcc knows what would be read back).
__global__ void shared_strided(float* out, int stride) {
  extern __shared__ float buffer[];
  buffer[stride * threadIdx.x] = 1;
  out[threadIdx.x] = buffer[stride * threadIdx.x];
}

__global__ void wide(const float4* in, float4* out, int stride) {
  out[threadIdx.x] = in[stride * threadIdx.x];
}

// Half of the lanes do nothing in the loop.
__global__ void half_idle(float* out, int rounds) {
  float value = 0;
  if (threadIdx.x % 2 == 0)
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) value = value * 0.5f + 1.0f;
  out[threadIdx.x] = value;
}
}
