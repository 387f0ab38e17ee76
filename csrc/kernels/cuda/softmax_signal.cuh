// Softmax, error signal and its direction on CUDA. Struct and meaning: kernels/kernels.h.
#pragma once

#include "softmax_row.cuh"

namespace fused_recoder {
namespace cuda {

// What all threads need to write the direction. In shared memory, from thread 0.
template <typename A>
struct DirectionScalars {
  A maximum;
  A inverse;    // 1 / sum of exp(x)
  A mean;       // entropy: <o, x>
  A p_minus_1;  // gold: the direction at the target
  int target;   // gold; none: kNoColumn
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

// Each block writes the direction of its columns. kMoments: 1 for the gold signals and the
// plain softmax, 2 for the entropy. Grid: x = rows, y = split.blocks.
template <typename S, int kMoments>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<typename AccumulateIn<S>::type, 1>)
    softmax_signal_kernel(const SoftmaxSignal<S> p, const RowSplit split) {
  using A = typename AccumulateIn<S>::type;
  constexpr bool kEntropy = kMoments == 2;
  const bool open = p.kind == SignalKind::kSoftmax;  // the target is not known yet
  __shared__ RowSlots<A, 1, kMoments> slots;
  __shared__ DirectionScalars<A> scalars;
  const LogitRows<A> in{static_cast<int>(p.vocab), p.logits, nullptr, p.targets};
  const int64_t row = blockIdx.x;
  const bool ignored = is_ignored(in, row);
  double log_p = 0, log_sum = 0, mean = 0;  // in thread 0
  if (!ignored) {
    const RowTotals<A, 1, kMoments> totals =
        combine_threads(scan_or_collect<A, 1, kMoments>(in, split, row), slots);
    if (threadIdx.x == 0) {
      const double sum = totals.sums[0][0];
      log_sum = log(sum);
      scalars.maximum = totals.maximum;
      scalars.inverse = static_cast<A>(1 / sum);
      if (kEntropy) {
        mean = totals.sums[0][kMoments - 1] / sum;
        scalars.mean = static_cast<A>(mean);
      } else if (open) {
        log_sum += double(totals.maximum);
        scalars.target = kNoColumn;
      } else {
        const Target<A> target = find_target<A, 1, kMoments>(in, split, row, totals.argmax);
        log_p = (double(target.logit) - double(totals.maximum)) - log_sum;
        scalars.target = target.column;
        scalars.p_minus_1 = static_cast<A>(expm1(log_p));  // without cancellation
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0 && blockIdx.y == 0) {
    if (ignored) {
      write_row_values(p, row, 0, 0, 0, p.targets[row]);
    } else if (kEntropy) {
      p.delta[row] = static_cast<A>(log_sum - mean);
      if (p.scale != nullptr) p.scale[row] = A(1);
    } else if (open) {
      p.delta[row] = static_cast<A>(log_sum);
    } else {
      const GoldSignal signal = gold_signal(p.kind, log_p);
      write_row_values(p, row, signal.delta, signal.scale, log_p, scalars.target);
    }
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
        const A x = shifted(value[i], scalars.maximum), o = exp(x) * scalars.inverse;
        if (kEntropy)
          value[i] = -o * (x - scalars.mean);  // log o + H = x - <o, x>
        else
          value[i] = j + i == scalars.target ? scalars.p_minus_1 : o;
      }
    }
    store<N>(direction + j, value);
  });
}

template <typename S, int kMoments>
void launch_softmax_signal(cudaStream_t stream, const SoftmaxSignal<S>& p, RowPlan plan) {
  using A = typename AccumulateIn<S>::type;
  const RowSplit split = split_rows(p.vocab, plan, p.scratch);
  const dim3 grid(p.rows, split.blocks);
  if (split.partials != nullptr) {
    const LogitRows<A> in{static_cast<int>(p.vocab), p.logits, nullptr, p.targets};
    CUDA_LAUNCH(grid, plan.threads, 0, stream, softmax_scan_kernel<A, 1, kMoments>)(in, split);
  }
  CUDA_LAUNCH(grid, plan.threads, 0, stream, softmax_signal_kernel<S, kMoments>)(p, split);
}

template <typename S>
void softmax_signal_planned(cudaStream_t stream, const SoftmaxSignal<S>& p, RowPlan plan) {
  if (p.kind == SignalKind::kEntropy)
    launch_softmax_signal<S, 2>(stream, p, plan);
  else
    launch_softmax_signal<S, 1>(stream, p, plan);
}

template <typename S>
void softmax_signal(const Launch& launch, const SoftmaxSignal<S>& p) {
  RowPlan plan = plan_rows(p.rows, p.vocab);
  if (p.scratch == nullptr) plan.blocks_per_row = 1;
  softmax_signal_planned(static_cast<cudaStream_t>(launch.stream), p, plan);
}

}  // namespace cuda
}  // namespace fused_recoder
