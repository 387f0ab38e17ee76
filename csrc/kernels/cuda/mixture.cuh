// The entropy of the mean of K predictions on CUDA: one launch, one block for the K rows of an
// instance, however many they are. Struct and meaning: kernels/kernels.h.
#pragma once

#include <float.h>

#include "softmax_row.cuh"

namespace fused_recoder {
namespace cuda {

template <typename A>
constexpr A kSmallestNormal = sizeof(A) == sizeof(float) ? A(FLT_MIN) : A(DBL_MIN);

// What all threads need to know of a row. In shared memory, from thread 0.
template <typename A>
struct MixtureScalars {
  A maximum, inverse;  // of the softmax
  A mean;              // <o_k, log m>
};

// The softmax of sample k replaces its logits and is added to the mean, which gathers in log_mean.
template <typename A, typename S>
__device__ __forceinline__ void add_prediction(const MixtureSignal<S>& p, int64_t b, int64_t k,
                                               RowSlots<A, 1, 1>& slots,
                                               MixtureScalars<A>& scalars) {
  A* row = p.logits + (k * p.rows + b) * p.vocab;                                    // [V]
  A* mean = p.log_mean + b * p.vocab;                                                // [V]
  const A* common = p.common != nullptr ? p.common + b * p.common_stride : nullptr;  // [V]
  const A share = static_cast<A>(1.0 / static_cast<double>(p.samples));
  const bool phases_agree =
      phase(mean) == phase(row) && (common == nullptr || phase(common) == phase(row));
  const Columns columns = columns_of(0, static_cast<int>(p.vocab), row, phases_agree);
  RowState<A, 1, 1> state = empty_row<A, 1, 1>();
  for_columns(columns, [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A l[N], ones[1][N];
    load<N>(l, row + j);
    if (common != nullptr) {
      A shared[N];
      load<N>(shared, common + j);
#pragma unroll
      for (int i = 0; i < N; ++i) l[i] += shared[i];
      store<N>(row + j, l);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) ones[0][i] = A(1);
    add_columns(state, j, l, ones);
  });
  const RowTotals<A, 1, 1> totals = combine_threads(state, slots);
  if (threadIdx.x == 0) {
    scalars.maximum = totals.maximum;
    scalars.inverse = static_cast<A>(1 / totals.sums[0][0]);
  }
  __syncthreads();
  for_columns(columns, [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A o[N], m[N] = {};
    load<N>(o, row + j);
    if (k > 0) load<N>(m, mean + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      o[i] = exp(shifted(o[i], scalars.maximum)) * scalars.inverse;
      m[i] += o[i] * share;
    }
    store<N>(row + j, o);
    store<N>(mean + j, m);
  });
  __syncthreads();  // the next sample uses the shared memory again, and other threads its columns
}

// log m takes the place of m; returns this thread's part of -<m, log m>.
template <typename A>
__device__ __forceinline__ A take_logarithm(A* mean, int vocab) {
  A entropy = A(0);
  for_columns(columns_of(0, vocab, mean, true), [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A m[N];
    load<N>(m, mean + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // Where the mean underflows its share of everything is 0, not 0 * -inf. (NaN stays.)
      const A log_m = m[i] >= kSmallestNormal<A> ? log(m[i]) : m[i] * A(0);
      entropy -= m[i] * log_m;
      m[i] = log_m;
    }
    store<N>(mean + j, m);
  });
  return entropy;
}

template <typename A, typename S>
__device__ __forceinline__ void write_direction(const MixtureSignal<S>& p, int64_t b, int64_t k,
                                                A (&slots)[kMaxWarps], MixtureScalars<A>& scalars) {
  const A* row = p.logits + (k * p.rows + b) * p.vocab;  // [V] o_k
  const A* log_mean = p.log_mean + b * p.vocab;          // [V]
  S* direction = p.direction + (k * p.rows + b) * p.vocab;
  S* sum = p.direction_sum != nullptr ? p.direction_sum + b * p.vocab : nullptr;
  const A share = static_cast<A>(-1.0 / static_cast<double>(p.samples));
  const int vocab = static_cast<int>(p.vocab);
  A dot = A(0);
  for_columns(columns_of(0, vocab, row, phase(log_mean) == phase(row)), [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A o[N], log_m[N];
    load<N>(o, row + j);
    load<N>(log_m, log_mean + j);
#pragma unroll
    for (int i = 0; i < N; ++i) dot += o[i] * log_m[i];
  });
  const double mean = sum_block(dot, slots);
  if (threadIdx.x == 0) scalars.mean = static_cast<A>(mean);
  __syncthreads();
  const bool phases_agree = phase(log_mean) == phase(row) && phase(direction) == phase(row) &&
                            (sum == nullptr || phase(sum) == phase(row));
  for_columns(columns_of(0, vocab, row, phases_agree), [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A u[N], log_m[N];
    load<N>(u, row + j);
    load<N>(log_m, log_mean + j);
#pragma unroll
    for (int i = 0; i < N; ++i) u[i] *= share * (log_m[i] - scalars.mean);
    store<N>(direction + j, u);
    if (sum == nullptr) return;
    if (k > 0) {
      A before[N];
      load<N>(before, sum + j);
#pragma unroll
      for (int i = 0; i < N; ++i) u[i] += before[i];
    }
    store<N>(sum + j, u);
  });
  __syncthreads();
}

// Grid: x = rows.
template <typename S>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<typename AccumulateIn<S>::type, 1>)
    mixture_signal_kernel(const MixtureSignal<S> p) {
  using A = typename AccumulateIn<S>::type;
  __shared__ RowSlots<A, 1, 1> slots;
  __shared__ A sum_slots[kMaxWarps];
  __shared__ MixtureScalars<A> scalars;
  const int64_t b = blockIdx.x;
  for (int64_t k = 0; k < p.samples; ++k) add_prediction(p, b, k, slots, scalars);
  const double entropy =
      sum_block(take_logarithm(p.log_mean + b * p.vocab, static_cast<int>(p.vocab)), sum_slots);
  if (threadIdx.x == 0) p.delta[b] = static_cast<A>(entropy);
  __syncthreads();
  if (p.direction == nullptr) return;
  for (int64_t k = 0; k < p.samples; ++k) write_direction(p, b, k, sum_slots, scalars);
}

template <typename S>
void launch_mixture_signal(cudaStream_t stream, const MixtureSignal<S>& p, int threads) {
  CUDA_LAUNCH(p.rows, threads, 0, stream, mixture_signal_kernel<S>)(p);
}

template <typename S>
void mixture_signal(const Launch& launch, const MixtureSignal<S>& p) {
  launch_mixture_signal(static_cast<cudaStream_t>(launch.stream), p, row_threads(p.vocab));
}

}  // namespace cuda
}  // namespace fused_recoder
