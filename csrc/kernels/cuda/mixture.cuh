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
    add_columns(OneSum(), state, j, l, ones);
  });
  const RowTotals<A, 1, 1> totals = combine_threads(OneSum(), state, slots);
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

// ---- Second derivatives -----------------------------------------------------------------------

template <typename A>
struct CurvatureScalars {
  A maximum, inverse, mean_bar;  // of the softmax; <o_k, bar_k>
  A mean_log, mean_change;       // <o_k, log m> and how it changes along the cotangents
};

// The softmax of sample k replaces its logits, bar - <o, bar> its cotangents; m and d(m) gather in
// log_mean and slope.
template <typename A>
__device__ __forceinline__ void add_change(const MixtureSignalBackward<A>& p, int64_t b, int64_t k,
                                           RowSlots<A, 2, 1>& slots, CurvatureScalars<A>& scalars) {
  const int vocab = static_cast<int>(p.vocab);
  const int64_t row = k * p.rows + b;
  A *o = p.logits + row * p.vocab, *bar = p.u_bar + row * p.vocab;     // [V]
  A *mean = p.log_mean + b * p.vocab, *slope = p.slope + b * p.vocab;  // [V]
  const LogitRows<A> in{vocab, p.logits, p.u_bar, nullptr};
  const RowTotals<A, 2, 1> totals =
      combine_threads(OneSum(), scan_columns<2>(OneSum(), in, row, 0, vocab), slots);
  if (threadIdx.x == 0) {
    scalars.maximum = totals.maximum;
    scalars.inverse = static_cast<A>(1 / totals.sums[0][0]);
    scalars.mean_bar = static_cast<A>(totals.sums[1][0] / totals.sums[0][0]);
  }
  __syncthreads();
  const A share = static_cast<A>(1.0 / static_cast<double>(p.samples));
  const bool phases_agree =
      phase(bar) == phase(o) && phase(mean) == phase(o) && phase(slope) == phase(o);
  for_columns(columns_of(0, vocab, o, phases_agree), [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A value[N], along[N], m[N] = {}, dm[N] = {};
    load<N>(value, o + j);
    load<N>(along, bar + j);
    if (k > 0) {
      load<N>(m, mean + j);
      load<N>(dm, slope + j);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] = exp(shifted(value[i], scalars.maximum)) * scalars.inverse;
      along[i] -= scalars.mean_bar;
      m[i] += value[i] * share;
      dm[i] += value[i] * along[i] * share;
    }
    store<N>(o + j, value);
    store<N>(bar + j, along);
    store<N>(mean + j, m);
    store<N>(slope + j, dm);
  });
  __syncthreads();  // the next sample uses the shared memory again, and other threads its columns
}

// log m and d(log m) take the places of m and d(m).
template <typename A>
__device__ __forceinline__ void take_logarithm_and_slope(A* mean, A* slope, int vocab) {
  for_columns(columns_of(0, vocab, mean, phase(slope) == phase(mean)), [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A m[N], dm[N];
    load<N>(m, mean + j);
    load<N>(dm, slope + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool counts = m[i] >= kSmallestNormal<A>;
      dm[i] = counts ? dm[i] / m[i] : m[i] * A(0);
      m[i] = counts ? log(m[i]) : m[i] * A(0);
    }
    store<N>(mean + j, m);
    store<N>(slope + j, dm);
  });
}

template <typename A>
__device__ __forceinline__ void write_curvature(const MixtureSignalBackward<A>& p, int64_t b,
                                                int64_t k, A (&log_slots)[kMaxWarps],
                                                A (&change_slots)[kMaxWarps],
                                                CurvatureScalars<A>& scalars) {
  const int vocab = static_cast<int>(p.vocab);
  const int64_t row = k * p.rows + b;
  A *o = p.logits + row * p.vocab, *bar = p.u_bar + row * p.vocab;               // [V]
  const A *log_mean = p.log_mean + b * p.vocab, *slope = p.slope + b * p.vocab;  // [V]
  const A share = static_cast<A>(1.0 / static_cast<double>(p.samples));
  const bool phases_agree =
      phase(bar) == phase(o) && phase(log_mean) == phase(o) && phase(slope) == phase(o);
  const Columns columns = columns_of(0, vocab, o, phases_agree);
  A mean_log = A(0), mean_change = A(0);
  for_columns(columns, [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A value[N], along[N], log_m[N], change[N];
    load<N>(value, o + j);
    load<N>(along, bar + j);
    load<N>(log_m, log_mean + j);
    load<N>(change, slope + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      mean_log += value[i] * log_m[i];
      mean_change += value[i] * (change[i] + along[i] * log_m[i]);
    }
  });
  const double of_log = sum_block(mean_log, log_slots);
  const double of_change = sum_block(mean_change, change_slots);
  if (threadIdx.x == 0) {
    scalars.mean_log = static_cast<A>(of_log);
    scalars.mean_change = static_cast<A>(of_change);
  }
  __syncthreads();
  for_columns(columns, [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A value[N], along[N], log_m[N], change[N];
    load<N>(value, o + j);
    load<N>(along, bar + j);
    load<N>(log_m, log_mean + j);
    load<N>(change, slope + j);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A weight = -share * value[i], centred = log_m[i] - scalars.mean_log;
      along[i] = weight * (along[i] * centred + change[i] - scalars.mean_change);
      value[i] = weight * centred;
    }
    store<N>(o + j, value);
    store<N>(bar + j, along);
  });
  __syncthreads();
}

// Four arrays of doubles take more registers than a block of the usual size has.
template <typename A>
constexpr int kCurvatureThreads = sizeof(A) == 8 ? kRowThreads / 2 : kRowThreads;

// Grid: x = rows.
template <typename A>
__global__ void __launch_bounds__(kCurvatureThreads<A>, 1)
    mixture_signal_backward_kernel(const MixtureSignalBackward<A> p) {
  __shared__ RowSlots<A, 2, 1> slots;
  __shared__ A log_slots[kMaxWarps], change_slots[kMaxWarps];
  __shared__ CurvatureScalars<A> scalars;
  const int64_t b = blockIdx.x;
  for (int64_t k = 0; k < p.samples; ++k) add_change(p, b, k, slots, scalars);
  take_logarithm_and_slope(p.log_mean + b * p.vocab, p.slope + b * p.vocab,
                           static_cast<int>(p.vocab));
  __syncthreads();
  for (int64_t k = 0; k < p.samples; ++k)
    write_curvature(p, b, k, log_slots, change_slots, scalars);
}

template <typename A>
void launch_mixture_signal_backward(cudaStream_t stream, const MixtureSignalBackward<A>& p,
                                    int threads) {
  const int most = kCurvatureThreads<A>;
  CUDA_LAUNCH(p.rows, threads < most ? threads : most, 0, stream,
              mixture_signal_backward_kernel<A>)(p);
}

// Nothing of it is stored in S: one kernel serves all storage types with the same A.
template <typename S>
void mixture_signal_backward(const Launch& launch, const MixtureSignalBackward<S>& p) {
  using A = typename AccumulateIn<S>::type;
  const MixtureSignalBackward<A> same{p.samples, p.rows,     p.vocab, p.logits,
                                      p.u_bar,   p.log_mean, p.slope};
  launch_mixture_signal_backward(static_cast<cudaStream_t>(launch.stream), same,
                                 row_threads(p.vocab));
}

}  // namespace cuda
}  // namespace fused_recoder
