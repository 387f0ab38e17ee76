// Back-propagation through the recoding step itself, on CUDA. Struct and meaning:
// kernels/kernels.h; derivation: docs/exact-gradients.md.
#pragma once

#include "cell.cuh"

namespace fused_recoder {
namespace cuda {

// What follows for unit k from the cotangents `below` of what went to the layer below:
// d_i = a_c g i (1 - i), d_f = a_c c_prev f (1 - f), d_g = a_c i (1 - g^2),
// d_o = a_h tanh(c) o (1 - o).
template <typename A>
struct UnitBars {
  A a_h, a_c;                  // of the gradients in h and c
  A i, f, g, o, tanh, c_prev;  // i, f, g: of the pre-activations; o: of the gate
};

template <typename A>
__device__ __forceinline__ void from_below(UnitBars<A>& bar, const GateQuad<A>& gate,
                                           const GateQuad<A>& below, int k, A a_h, A a_c, A tanh_c,
                                           A c_prev) {
  const A i = gate.i[k], f = gate.f[k], g = gate.g[k], o = gate.o[k];
  const A di = i * (A(1) - i), df = f * (A(1) - f), dg = A(1) - g * g, d_o = o * (A(1) - o);
  bar.a_c += below.i[k] * g * di + below.f[k] * c_prev * df + below.g[k] * i * dg;
  bar.a_h += below.o[k] * tanh_c * d_o;
  bar.i = (below.i[k] * a_c * g * (A(1) - A(2) * i) + below.g[k] * a_c * dg) * di;
  bar.f = below.f[k] * a_c * c_prev * (A(1) - A(2) * f) * df;
  bar.g = (below.i[k] * a_c * di - A(2) * below.g[k] * a_c * i * g) * dg;
  bar.o = below.o[k] * a_h * tanh_c * (A(1) - A(2) * o);
  bar.tanh = below.o[k] * a_h * d_o;
  bar.c_prev = below.f[k] * a_c * df;
}

// Grid as in units.cuh.
template <typename S, int kAlign>
__global__ void __launch_bounds__(kRowUnitThreads, kUnitBlocks)
    recode_backward_kernel(const RecodeBackward<S> p) {
  using A = typename AccumulateIn<S>::type;
  __shared__ A slots_h[kMaxWarps], slots_c[kMaxWarps];
  const int H = static_cast<int>(p.hidden);
  const int64_t row = blockIdx.x, start = row * H;
  const A row_step_h = step_of_row(p.alpha_h, row), row_step_c = step_of_row(p.alpha_c, row);
  A dot_h = A(0), dot_c = A(0);
  for (int j = first_quad(); j < H; j += quad_stride()) {
    const int count = H - j;
    GateQuad<A> gate, below, d;
    A c_prev[kQuad], a_h[kQuad], h_bar[kQuad], c_bar[kQuad], factor[kQuad];
    A tanh_c[kQuad], a_c[kQuad], in_h[kQuad], in_c[kQuad];
    load_gates<kAlign>(gate, p.gates + 4 * start, H, j, count);
    load_quad<kAlign>(c_prev, p.c_prev + start + j, count);
    load_quad<kAlign>(a_h, p.grad_h + start + j, count);
    load_quad<kAlign>(h_bar, p.dh_recoded + start + j, count);
    load_quad<kAlign>(c_bar, p.dc_recoded + start + j, count);
    if (p.dh_up != nullptr) {
      A up[kQuad];
      load_quad<kAlign>(up, p.dh_up + start + j, count);
      dropout_factors(factor, p.up_dropout, p.time, row, j);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) h_bar[k] += up[k] * factor[k];
    }
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      tanh_c[k] = tanh(gate.f[k] * c_prev[k] + gate.i[k] * gate.g[k]);
      a_c[k] = a_h[k] * gate.o[k] * (A(1) - tanh_c[k] * tanh_c[k]);
      in_h[k] = a_h[k] * h_bar[k];
      in_c[k] = a_c[k] * c_bar[k];
      dot_h += in_h[k];
      dot_c += in_c[k];
    }
    add_to_units<kAlign>(p.step_bar_h, in_h, start + j, count);
    add_to_units<kAlign>(p.step_bar_c, in_c, start + j, count);
    if (p.dgates != nullptr) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k)
        gate_cotangents(d, gate, k, tanh_c[k], c_prev[k], a_h[k], a_c[k]);
      store_gates<kAlign>(p.dgates + 4 * start, d, H, j, count);
    }
    dropout_factors(factor, p.dropout, p.time, row, j);
    if (p.h_signal != nullptr) {
      A h[kQuad];
#pragma unroll
      for (int k = 0; k < kQuad; ++k) h[k] = gate.o[k] * tanh_c[k] * factor[k];
      store_quad<kAlign>(p.h_signal + start + j, h, count);
    }
    A alpha_h[kQuad], alpha_c[kQuad];
    load_steps<kAlign>(alpha_h, p.alpha_h, row_step_h, j, count);
    load_steps<kAlign>(alpha_c, p.alpha_c, row_step_c, j, count);
    if (p.dgates_bar != nullptr) load_gates<kAlign>(below, p.dgates_bar + 4 * start, H, j, count);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      UnitBars<A> bar{-alpha_h[k] * h_bar[k], -alpha_c[k] * c_bar[k], 0, 0, 0, 0, 0, 0};
      if (p.dgates_bar != nullptr)
        from_below(bar, gate, below, k, a_h[k], a_c[k], tanh_c[k], c_prev[k]);
      // a_c = a_h o (1 - tanh(c)^2)
      const A o = gate.o[k], slope = A(1) - tanh_c[k] * tanh_c[k];
      bar.a_h += bar.a_c * o * slope;
      bar.o += bar.a_c * a_h[k] * slope;
      bar.tanh -= A(2) * bar.a_c * a_h[k] * o * tanh_c[k];
      h_bar[k] = bar.a_h * factor[k];
      c_bar[k] = bar.tanh * slope;
      c_prev[k] = bar.c_prev;
      d.i[k] = bar.i;
      d.f[k] = bar.f;
      d.g[k] = bar.g;
      d.o[k] = bar.o * o * (A(1) - o);
    }
    store_quad<kAlign>(p.from_above_bar + start + j, h_bar, count);
    store_gates<kAlign>(p.gates_bar + 4 * start, d, H, j, count);
    store_quad<kAlign>(p.c_bar + start + j, c_bar, count);
    store_quad<kAlign>(p.c_prev_bar + start + j, c_prev, count);
  }
  if (p.step_bar_h.row != nullptr) {
    const double sum = sum_block(dot_h, slots_h);
    if (threadIdx.x == 0) p.step_bar_h.row[row] = static_cast<A>(-sum);
  }
  if (p.step_bar_c.row != nullptr) {
    const double sum = sum_block(dot_c, slots_c);
    if (threadIdx.x == 0) p.step_bar_c.row[row] = static_cast<A>(-sum);
  }
}

template <typename S>
void launch_recode_backward(cudaStream_t stream, const RecodeBackward<S>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  with_alignment(common_alignment(p.hidden, p.gates, p.c_prev, p.grad_h, p.dh_recoded, p.dh_up,
                                  p.dc_recoded, p.dgates_bar, p.from_above_bar, p.h_signal,
                                  p.dgates, p.gates_bar, p.c_bar, p.c_prev_bar, p.alpha_h.unit,
                                  p.alpha_c.unit, p.step_bar_h.unit, p.step_bar_c.unit),
                 [&](auto align) {
                   constexpr int kAlign = decltype(align)::value;
                   CUDA_LAUNCH(grid, plan.threads, 0, stream, recode_backward_kernel<S, kAlign>)(p);
                 });
}

template <typename S>
void recode_backward(const Launch& launch, const RecodeBackward<S>& p) {
  const bool sums = p.step_bar_h.row != nullptr || p.step_bar_c.row != nullptr;
  launch_recode_backward(static_cast<cudaStream_t>(launch.stream), p, plan_units(p.hidden, sums));
}

}  // namespace cuda
}  // namespace fused_recoder
