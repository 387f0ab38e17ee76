// A gold token that comes after the prediction, on CUDA. Struct and meaning: kernels/kernels.h.
#pragma once

#include "units.cuh"

namespace fused_recoder {
namespace cuda {

// Grid as in units.cuh.
template <typename S, int kAlign>
__global__ void __launch_bounds__(kUnitThreads) gold_arrives_kernel(const GoldArrives<S> p) {
  using A = typename AccumulateIn<S>::type;
  const int H = static_cast<int>(p.hidden);
  const int64_t row = blockIdx.x, target = p.targets[row];
  const bool ignored = target < 0;
  DEVICE_ASSERT(target < p.vocab && "target out of range");
  if (first_quad() == 0) {
    GoldSignal signal{0, 0, 0};
    if (!ignored)
      signal = gold_signal(p.signal.kind,
                           double(p.logits[row * p.vocab + target]) - double(p.log_sum[row]));
    p.delta[row] = static_cast<A>(signal.delta);
    p.scale[row] = static_cast<A>(signal.scale);
  }
  for (int j = first_quad(); j < H; j += quad_stride()) {
    const int count = H - j;
    A expected[kQuad], weight[kQuad];
    if (ignored) {
      clear_quad<kAlign>(p.dh + row * H + j, count);
      continue;
    }
    load_quad<kAlign>(expected, p.expected + row * H + j, count);
    load_quad<kAlign>(weight, p.weight + target * H + j, count);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) expected[k] -= weight[k];
    store_quad<kAlign>(p.dh + row * H + j, expected, count);
  }
}

template <typename S>
void launch_gold_arrives(cudaStream_t stream, const GoldArrives<S>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  with_alignment(common_alignment(p.hidden, p.expected, p.weight, p.dh), [&](auto align) {
    constexpr int kAlign = decltype(align)::value;
    CUDA_LAUNCH(grid, plan.threads, 0, stream, gold_arrives_kernel<S, kAlign>)(p);
  });
}

template <typename S>
void gold_arrives(const Launch& launch, const GoldArrives<S>& p) {
  launch_gold_arrives(static_cast<cudaStream_t>(launch.stream), p, plan_units(p.hidden, false));
}

}  // namespace cuda
}  // namespace fused_recoder
