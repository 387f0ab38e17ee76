// Softmax, error signal and its direction on CUDA. Struct and meaning: kernels/kernels.h.
#pragma once

#include "softmax_row.cuh"

namespace fused_recoder {
namespace cuda {

// What all threads need to write the direction. In shared memory, from thread 0.
template <typename A>
struct SoftmaxScalars {
  A maximum;
  A inverse;  // 1 / sum of exp(x)
};
template <typename A>
struct TokenScalars : SoftmaxScalars<A> {
  A p_minus_1;  // the direction at the target
  int target;   // kNoColumn: not known yet
  __device__ __forceinline__ A direction(int column, A, A o) const {
    return column == target ? p_minus_1 : o;
  }
};
template <typename A, typename Signal>
struct WholeScalars : SoftmaxScalars<A> {
  typename Signal::template Row<A> row;
  __device__ __forceinline__ A direction(int, A x, A o) const {
    return row.along(Word<A>{x, x, o}, A(1), DeviceMath<A>());
  }
};

template <typename S>
__device__ __forceinline__ void write_row_values(const SoftmaxSignal<S>& p, int64_t row,
                                                 double delta, double scale, double log_p,
                                                 int64_t chosen) {
  using A = typename AccumulateIn<S>::type;
  p.delta[row] = static_cast<A>(delta);
  if (p.scale != nullptr) p.scale[row] = static_cast<A>(scale);
  if (p.log_p != nullptr) p.log_p[row] = static_cast<A>(log_p);
  if (p.chosen != nullptr) p.chosen[row] = chosen;
}

// From the sums of a row, its values (of its first block) and what its direction is made of. Called
// by one thread.
template <typename S, typename A>
__device__ __forceinline__ void finish_row(const OneToken& token, const SoftmaxSignal<S>& p,
                                           const LogitRows<A>& in, const RowSplit& split,
                                           int64_t row, const RowTotals<A, 1, 1>& totals,
                                           TokenScalars<A>& scalars) {
  const double log_sum = log(totals.sums[0][0]);
  if (token.is_open()) {
    scalars.target = kNoColumn;
    if (blockIdx.y == 0) p.delta[row] = static_cast<A>(log_sum + double(totals.maximum));
    return;
  }
  const Target<A> target = find_target<A, 1, 1>(in, split, row, totals.argmax);
  const double log_p = (double(target.logit) - double(totals.maximum)) - log_sum;
  scalars.target = target.column;
  scalars.p_minus_1 = static_cast<A>(expm1(log_p));  // without cancellation
  if (blockIdx.y != 0) return;
  const GoldSignal signal = gold_signal(token.kind, log_p);
  write_row_values(p, row, signal.delta, signal.scale, log_p, target.column);
}

template <typename S, typename A, typename Signal>
__device__ __forceinline__ void finish_row(const Signal& signal, const SoftmaxSignal<S>& p,
                                           const LogitRows<A>&, const RowSplit&, int64_t row,
                                           const RowTotals<A, 1, 2>& totals,
                                           WholeScalars<A, Signal>& scalars) {
  const double sum = totals.sums[0][0], mean = totals.sums[0][1] / sum;
  scalars.row = signal.template row<A>(sum, mean, 0);
  if (blockIdx.y != 0) return;
  p.delta[row] = static_cast<A>(signal.delta(sum, mean));
  if (p.scale != nullptr) p.scale[row] = A(1);
}

// Each block writes the direction of its columns. Grid: x = rows, y = split.blocks.
template <typename S, typename Signal>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<typename AccumulateIn<S>::type, 1>)
    softmax_signal_kernel(const SoftmaxSignal<S> p, const Signal signal, const RowSplit split) {
  using A = typename AccumulateIn<S>::type;
  using Scalars = std::conditional_t<Signal::kSums == 1, TokenScalars<A>, WholeScalars<A, Signal>>;
  __shared__ RowSlots<A, 1, Signal::kSums> slots;
  __shared__ Scalars scalars;
  const LogitRows<A> in{static_cast<int>(p.vocab), p.logits, nullptr, p.targets};
  const int64_t row = blockIdx.x;
  const bool ignored = is_ignored(in, row);
  if (!ignored) {
    const auto totals = combine_threads(signal, scan_or_collect<1>(signal, in, split, row), slots);
    if (threadIdx.x == 0) {
      scalars.maximum = totals.maximum;
      scalars.inverse = static_cast<A>(1 / totals.sums[0][0]);
      finish_row(signal, p, in, split, row, totals, scalars);
    }
    __syncthreads();
  } else if (threadIdx.x == 0 && blockIdx.y == 0) {
    write_row_values(p, row, 0, 0, 0, p.targets[row]);
  }
  if (p.direction == nullptr) return;
  const A* logits = p.logits + row * p.vocab;  // [V]
  S* direction = p.direction + row * p.vocab;  // [V], may be the memory of logits
  const Columns columns = columns_of(split.begin(in.vocab), split.end(in.vocab), logits,
                                     phase(direction) == phase(logits));
  for_columns(columns, [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A value[N] = {};
    if (!ignored) {
      load<N>(value, logits + j);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A x = shifted(value[i], scalars.maximum);
        value[i] = scalars.direction(j + i, x, exp(x) * scalars.inverse);
      }
    }
    store<N>(direction + j, value);
  });
}

template <typename S, typename Signal>
void launch_softmax_signal(cudaStream_t stream, const SoftmaxSignal<S>& p, const Signal& signal,
                           RowPlan plan) {
  using A = typename AccumulateIn<S>::type;
  const RowSplit split = split_rows(p.vocab, plan, p.scratch);
  const dim3 grid(p.rows, split.blocks);
  if (split.partials != nullptr) {
    const LogitRows<A> in{static_cast<int>(p.vocab), p.logits, nullptr, p.targets};
    CUDA_LAUNCH(grid, plan.threads, 0, stream, softmax_scan_kernel<A, 1, Signal>)
    (in, signal, split);
  }
  CUDA_LAUNCH(grid, plan.threads, 0, stream, softmax_signal_kernel<S, Signal>)(p, signal, split);
}

template <typename S>
void softmax_signal_planned(cudaStream_t stream, const SoftmaxSignal<S>& p, RowPlan plan) {
  with_row_signal(p.signal,
                  [&](const auto& signal) { launch_softmax_signal(stream, p, signal, plan); });
}

template <typename S>
void softmax_signal(const Launch& launch, const SoftmaxSignal<S>& p) {
  RowPlan plan = plan_rows(p.rows, p.vocab);
  if (p.scratch == nullptr) plan.blocks_per_row = 1;
  softmax_signal_planned(static_cast<cudaStream_t>(launch.stream), p, plan);
}

}  // namespace cuda
}  // namespace fused_recoder
