// Second derivatives of the signals on CUDA. Struct and meaning: kernels/kernels.h.
#pragma once

#include "softmax_row.cuh"

namespace fused_recoder {
namespace cuda {

// What all threads need to write the cotangents. In shared memory, from thread 0.
template <typename A>
struct CotangentScalars {
  A maximum;
  A inverse;       // 1 / sum of exp(x)
  A mean_bar;      // <o, u_bar>
  A delta_bar;     // entropy
  A mean;          // entropy: <o, x>
  A dot;           // entropy: <u, u_bar>
  A scale;         // gold: u = scale * (o - onehot)
  A on_direction;  // gold: cotangent of l = scale * (...) + on_direction * (o - onehot)
  A target_u;      // gold: what goes to the target's column
  A target_bar;    // gold
  int target;      // gold
};

template <typename A, int kMoments>
__device__ __forceinline__ void entropy_scalars(CotangentScalars<A>& to,
                                                const RowTotals<A, 2, kMoments>& totals) {
  const double inverse = 1 / totals.sums[0][0];
  const double mean = totals.sums[0][kMoments - 1] * inverse;
  const double mean_bar = totals.sums[1][0] * inverse;
  to.mean = static_cast<A>(mean);
  to.dot = static_cast<A>(mean * mean_bar - totals.sums[1][kMoments - 1] * inverse);
}

template <typename A, int kMoments>
__device__ __forceinline__ void gold_scalars(CotangentScalars<A>& to, SignalKind kind,
                                             const RowTotals<A, 2, kMoments>& totals,
                                             const Target<A>& target, double delta_bar,
                                             double loss_bar) {
  const double sum = totals.sums[0][0], mean_bar = totals.sums[1][0] / sum;
  const double log_p = (double(target.logit) - double(totals.maximum)) - log(sum);
  const double p_minus_1 = expm1(log_p);
  const GoldSignal signal = gold_signal(kind, log_p);
  const double along = mean_bar - double(target.weight);  // <o - onehot, u_bar>
  // d(log p)/d(l) = onehot - o
  const double on_direction = loss_bar + delta_bar * signal.scale - along * signal.scale_slope;
  to.scale = static_cast<A>(signal.scale);
  to.on_direction = static_cast<A>(on_direction);
  to.target = target.column;
  to.target_u = static_cast<A>(signal.scale * p_minus_1);
  to.target_bar = static_cast<A>(on_direction * p_minus_1 - signal.scale * (p_minus_1 + 1) * along);
}

// Each block writes its columns of u and u_bar. kMoments and grid as in softmax_signal_kernel.
template <typename A, int kMoments>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<A, 2>)
    softmax_signal_backward_kernel(const SoftmaxSignalBackward<A> p, const RowSplit split) {
  constexpr bool kEntropy = kMoments == 2;
  __shared__ RowSlots<A, 2, kMoments> slots;
  __shared__ CotangentScalars<A> scalars;
  const LogitRows<A> in{static_cast<int>(p.vocab), p.logits, p.u_bar, p.targets};
  const int64_t row = blockIdx.x;
  const bool ignored = is_ignored(in, row);
  if (!ignored) {
    const RowTotals<A, 2, kMoments> totals =
        combine_threads(scan_or_collect<A, 2, kMoments>(in, split, row), slots);
    if (threadIdx.x == 0) {
      scalars.maximum = totals.maximum;
      scalars.inverse = static_cast<A>(1 / totals.sums[0][0]);
      scalars.mean_bar = static_cast<A>(totals.sums[1][0] / totals.sums[0][0]);
      const A delta_bar = p.delta_bar != nullptr ? p.delta_bar[row] : A(0);
      scalars.delta_bar = delta_bar;
      if (kEntropy)
        entropy_scalars(scalars, totals);
      else
        gold_scalars(scalars, p.kind, totals,
                     find_target<A, 2, kMoments>(in, split, row, totals.argmax), delta_bar,
                     p.loss_bar != nullptr ? p.loss_bar[row] : A(0));
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
      A b[N];
      load<N>(u_out, logits + j);
      load<N>(b, bar + j);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A x = shifted(u_out[i], scalars.maximum), o = exp(x) * scalars.inverse;
        const A centred = b[i] - scalars.mean_bar;
        if (kEntropy) {
          u_out[i] = -o * (x - scalars.mean);
          bar_out[i] = centred * (u_out[i] - o) - o * scalars.dot + scalars.delta_bar * u_out[i];
        } else {
          const bool at_target = j + i == scalars.target;
          u_out[i] = at_target ? scalars.target_u : o * scalars.scale;
          bar_out[i] =
              at_target ? scalars.target_bar : o * (scalars.scale * centred + scalars.on_direction);
        }
      }
    }
    store<N>(u + j, u_out);
    store<N>(bar + j, bar_out);
  });
}

template <typename A, int kMoments>
void launch_softmax_signal_backward(cudaStream_t stream, const SoftmaxSignalBackward<A>& p,
                                    RowPlan plan) {
  const RowSplit split = split_rows(p.vocab, plan, p.scratch);
  const dim3 grid(p.rows, split.blocks);
  if (split.partials != nullptr) {
    const LogitRows<A> in{static_cast<int>(p.vocab), p.logits, p.u_bar, p.targets};
    CUDA_LAUNCH(grid, plan.threads, 0, stream, softmax_scan_kernel<A, 2, kMoments>)(in, split);
  }
  CUDA_LAUNCH(grid, plan.threads, 0, stream, softmax_signal_backward_kernel<A, kMoments>)
  (p, split);
}

template <typename A>
void softmax_signal_backward_planned(cudaStream_t stream, const SoftmaxSignalBackward<A>& p,
                                     RowPlan plan) {
  if (p.kind == SignalKind::kEntropy)
    launch_softmax_signal_backward<A, 2>(stream, p, plan);
  else
    launch_softmax_signal_backward<A, 1>(stream, p, plan);
}

// Nothing of it is stored in S: one kernel serves all storage types with the same A.
template <typename S>
void softmax_signal_backward(const Launch& launch, const SoftmaxSignalBackward<S>& p) {
  using A = typename AccumulateIn<S>::type;
  const SoftmaxSignalBackward<A> same{p.rows,      p.vocab,    p.kind,  p.logits, p.targets,
                                      p.delta_bar, p.loss_bar, p.u_bar, p.u,      p.scratch};
  RowPlan plan = plan_rows(p.rows, p.vocab);
  if (p.scratch == nullptr) plan.blocks_per_row = 1;
  softmax_signal_backward_planned(static_cast<cudaStream_t>(launch.stream), same, plan);
}

}  // namespace cuda
}  // namespace fused_recoder
