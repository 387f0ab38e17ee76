// Second derivatives of the signals on CUDA. Struct and meaning: kernels/kernels.h.
#pragma once

#include "softmax_row.cuh"

namespace fused_recoder {
namespace cuda {

// What all threads need to write the cotangents. In shared memory, from thread 0.
template <typename A>
struct SoftmaxBarScalars {
  A maximum;
  A inverse;   // 1 / sum of exp(x)
  A mean_bar;  // <o, u_bar>
};
template <typename A>
struct UAndBar {
  A u, bar;  // bar: the cotangent of the logit
};
template <typename A>
struct TokenBarScalars : SoftmaxBarScalars<A> {
  A scale;         // u = scale * (o - onehot)
  A on_direction;  // cotangent of l = scale * (...) + on_direction * (o - onehot)
  A target_u;      // what goes to the target's column
  A target_bar;
  int target;
  __device__ __forceinline__ UAndBar<A> differentiate(int column, A, A o, A centred) const {
    if (column == target) return {target_u, target_bar};
    return {o * scale, o * (scale * centred + on_direction)};
  }
};
template <typename A, typename Signal>
struct WholeBarScalars : SoftmaxBarScalars<A> {
  A delta_bar;
  A dot;  // <u, u_bar>
  typename Signal::template Row<A> row;
  __device__ __forceinline__ UAndBar<A> differentiate(int, A x, A o, A centred) const {
    const A u = row.along(Word<A>{x, x, o}, A(1), DeviceMath<A>());
    return {u, row.cotangent(u, o, centred, dot, delta_bar)};
  }
};

template <typename A>
__device__ __forceinline__ void finish_row(const OneToken& token, const SoftmaxSignalBackward<A>& p,
                                           const LogitRows<A>& in, const RowSplit& split,
                                           int64_t row, const RowTotals<A, 2, 1>& totals,
                                           TokenBarScalars<A>& scalars) {
  const double delta_bar = p.delta_bar != nullptr ? p.delta_bar[row] : A(0);
  const double loss_bar = p.loss_bar != nullptr ? p.loss_bar[row] : A(0);
  const Target<A> target = find_target<A, 2, 1>(in, split, row, totals.argmax);
  const double sum = totals.sums[0][0], mean_bar = totals.sums[1][0] / sum;
  const double log_p = (double(target.logit) - double(totals.maximum)) - log(sum);
  const double p_minus_1 = expm1(log_p);
  const GoldSignal signal = gold_signal(token.kind, log_p);
  const double along = mean_bar - double(target.weight);  // <o - onehot, u_bar>
  // d(log p)/d(l) = onehot - o
  const double on_direction = loss_bar + delta_bar * signal.scale - along * signal.scale_slope;
  scalars.scale = static_cast<A>(signal.scale);
  scalars.on_direction = static_cast<A>(on_direction);
  scalars.target = target.column;
  scalars.target_u = static_cast<A>(signal.scale * p_minus_1);
  scalars.target_bar =
      static_cast<A>(on_direction * p_minus_1 - signal.scale * (p_minus_1 + 1) * along);
}

template <typename A, typename Signal>
__device__ __forceinline__ void finish_row(const Signal& signal, const SoftmaxSignalBackward<A>& p,
                                           const LogitRows<A>&, const RowSplit&, int64_t row,
                                           const RowTotals<A, 2, 2>& totals,
                                           WholeBarScalars<A, Signal>& scalars) {
  const double sum = totals.sums[0][0], inverse = 1 / sum, mean = totals.sums[0][1] * inverse;
  scalars.delta_bar = p.delta_bar != nullptr ? p.delta_bar[row] : A(0);
  scalars.row = signal.template row<A>(sum, mean, 0);
  scalars.dot =
      static_cast<A>(signal.dot(mean, totals.sums[1][0] * inverse, totals.sums[1][1] * inverse));
}

// Each block writes its columns of u and u_bar. Grid as in softmax_signal_kernel.
template <typename A, typename Signal>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<A, 2>)
    softmax_signal_backward_kernel(const SoftmaxSignalBackward<A> p, const Signal signal,
                                   const RowSplit split) {
  using Scalars =
      std::conditional_t<Signal::kSums == 1, TokenBarScalars<A>, WholeBarScalars<A, Signal>>;
  __shared__ RowSlots<A, 2, Signal::kSums> slots;
  __shared__ Scalars scalars;
  const LogitRows<A> in{static_cast<int>(p.vocab), p.logits, p.u_bar, p.targets};
  const int64_t row = blockIdx.x;
  const bool ignored = is_ignored(in, row);
  if (!ignored) {
    const auto totals = combine_threads(signal, scan_or_collect<2>(signal, in, split, row), slots);
    if (threadIdx.x == 0) {
      scalars.maximum = totals.maximum;
      scalars.inverse = static_cast<A>(1 / totals.sums[0][0]);
      scalars.mean_bar = static_cast<A>(totals.sums[1][0] / totals.sums[0][0]);
      finish_row(signal, p, in, split, row, totals, scalars);
    }
    __syncthreads();
  }
  const A* logits = p.logits + row * p.vocab;  // [V]
  A* bar = p.u_bar + row * p.vocab;            // [V]
  A* u = p.u + row * p.vocab;                  // [V], may be the memory of logits
  const bool phases_agree = phase(bar) == phase(logits) && phase(u) == phase(logits);
  const Columns columns =
      columns_of(split.begin(in.vocab), split.end(in.vocab), logits, phases_agree);
  for_columns(columns, [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A u_out[N] = {}, bar_out[N] = {};
    if (!ignored) {
      load<N>(u_out, logits + j);
      load<N>(bar_out, bar + j);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A x = shifted(u_out[i], scalars.maximum), o = exp(x) * scalars.inverse;
        const UAndBar<A> out = scalars.differentiate(j + i, x, o, bar_out[i] - scalars.mean_bar);
        u_out[i] = out.u;
        bar_out[i] = out.bar;
      }
    }
    store<N>(u + j, u_out);
    store<N>(bar + j, bar_out);
  });
}

template <typename A, typename Signal>
void launch_softmax_signal_backward(cudaStream_t stream, const SoftmaxSignalBackward<A>& p,
                                    const Signal& signal, RowPlan plan) {
  const RowSplit split = split_rows(p.vocab, plan, p.scratch);
  const dim3 grid(p.rows, split.blocks);
  if (split.partials != nullptr) {
    const LogitRows<A> in{static_cast<int>(p.vocab), p.logits, p.u_bar, p.targets};
    CUDA_LAUNCH(grid, plan.threads, 0, stream, softmax_scan_kernel<A, 2, Signal>)
    (in, signal, split);
  }
  CUDA_LAUNCH(grid, plan.threads, 0, stream, softmax_signal_backward_kernel<A, Signal>)
  (p, signal, split);
}

template <typename A>
void softmax_signal_backward_planned(cudaStream_t stream, const SoftmaxSignalBackward<A>& p,
                                     RowPlan plan) {
  with_row_signal(p.signal, [&](const auto& signal) {
    launch_softmax_signal_backward(stream, p, signal, plan);
  });
}

// Nothing of it is stored in S: one kernel serves all storage types with the same A.
template <typename S>
void softmax_signal_backward(const Launch& launch, const SoftmaxSignalBackward<S>& p) {
  using A = typename AccumulateIn<S>::type;
  const SoftmaxSignalBackward<A> same{p.rows,      p.vocab,    p.signal, p.logits, p.targets,
                                      p.delta_bar, p.loss_bar, p.u_bar,  p.u,      p.scratch};
  RowPlan plan = plan_rows(p.rows, p.vocab);
  if (p.scratch == nullptr) plan.blocks_per_row = 1;
  softmax_signal_backward_planned(static_cast<cudaStream_t>(launch.stream), same, plan);
}

}  // namespace cuda
}  // namespace fused_recoder
