// The LSTM cell on CUDA: forward, recoding step, backward, one launch each. Structs and meaning:
// kernels/kernels.h; how rows are divided: units.cuh.
#pragma once

#include "reduce.cuh"
#include "units.cuh"

namespace fused_recoder {
namespace cuda {

template <typename A>
__device__ __forceinline__ A sigmoid(A x) {
  return A(1) / (A(1) + exp(-x));
}

template <typename A>
struct GateQuad {
  A i[kQuad], f[kQuad], g[kQuad], o[kQuad];
};

// `gates` [4H] is a row, `unit` the first of the quad.
template <int kAlign, typename A>
__device__ __forceinline__ void load_gates(GateQuad<A>& to, const A* gates, int H, int unit,
                                           int count) {
  load_quad<kAlign>(to.i, gates + unit, count);
  load_quad<kAlign>(to.f, gates + H + unit, count);
  load_quad<kAlign>(to.g, gates + 2 * H + unit, count);
  load_quad<kAlign>(to.o, gates + 3 * H + unit, count);
}

template <int kAlign, typename A, typename T>
__device__ __forceinline__ void store_gates(T* gates, const GateQuad<A>& from, int H, int unit,
                                            int count) {
  store_quad<kAlign>(gates + unit, from.i, count);
  store_quad<kAlign>(gates + H + unit, from.f, count);
  store_quad<kAlign>(gates + 2 * H + unit, from.g, count);
  store_quad<kAlign>(gates + 3 * H + unit, from.o, count);
}

template <int kAlign, typename T>
__device__ __forceinline__ void clear_gates(T* gates, int H, int unit, int count) {
#pragma unroll
  for (int gate = 0; gate < 4; ++gate) clear_quad<kAlign>(gates + gate * H + unit, count);
}

// Cotangents of the pre-activations of unit k, given those of h and c.
template <typename A>
__device__ __forceinline__ void gate_cotangents(GateQuad<A>& to, const GateQuad<A>& gate, int k,
                                                A tanh_c, A c_prev, A dh, A dc) {
  const A i = gate.i[k], f = gate.f[k], g = gate.g[k], o = gate.o[k];
  to.i[k] = dc * g * i * (A(1) - i);
  to.f[k] = dc * c_prev * f * (A(1) - f);
  to.g[k] = dc * i * (A(1) - g * g);
  to.o[k] = dh * tanh_c * o * (A(1) - o);
}

template <typename S, int kAlign>
__global__ void __launch_bounds__(kRowUnitThreads, kUnitBlocks)
    cell_forward_kernel(const CellForward<S> p) {
  using A = typename AccumulateIn<S>::type;
  const int H = static_cast<int>(p.hidden);
  const int64_t row = blockIdx.x;
  const bool live = p.live == nullptr || p.live[row];
  A* gates = p.gates + row * 4 * H;                          // [4H]
  const A* c_prev = p.c_prev + row * H;                      // [H]
  A* c = p.c + row * H;                                      // [H]
  S* h = p.h + row * H;                                      // [H]
  S* h_up = p.h_up != nullptr ? p.h_up + row * H : nullptr;  // [H]
  for (int j = first_quad(); j < H; j += quad_stride()) {
    const int count = H - j;
    if (!live) {
      copy_quad<kAlign>(c + j, c_prev + j, count);
      copy_quad<kAlign>(h + j, p.h_prev + row * H + j, count);
      clear_gates<kAlign>(gates, H, j, count);
      if (h_up != nullptr) clear_quad<kAlign>(h_up + j, count);
      continue;
    }
    GateQuad<A> gate;
    A cell[kQuad], hidden[kQuad];
    load_gates<kAlign>(gate, gates, H, j, count);
    load_quad<kAlign>(cell, c_prev + j, count);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      gate.i[k] = sigmoid(gate.i[k]);
      gate.f[k] = sigmoid(gate.f[k]);
      gate.g[k] = tanh(gate.g[k]);
      gate.o[k] = sigmoid(gate.o[k]);
      cell[k] = gate.f[k] * cell[k] + gate.i[k] * gate.g[k];
      hidden[k] = gate.o[k] * tanh(cell[k]);
    }
    store_gates<kAlign>(gates, gate, H, j, count);
    store_quad<kAlign>(c + j, cell, count);
    store_quad<kAlign>(h + j, hidden, count);
    if (h_up != nullptr) {
      A factor[kQuad];
      dropout_factors(factor, p.dropout, p.time, row, j);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) hidden[k] *= factor[k];
      store_quad<kAlign>(h_up + j, hidden, count);
    }
  }
}

template <typename A>
__device__ __forceinline__ A step_of_row(const StepSize<A>& size, int64_t row) {
  return size.step != nullptr ? size.step[row * size.stride] : A(0);
}

// Sizes of the quad at `unit` in a row whose own factor is known.
template <int kAlign, typename A>
__device__ __forceinline__ void load_steps(A (&to)[kQuad], const StepSize<A>& size, A of_row,
                                           int unit, int count) {
#pragma unroll
  for (int k = 0; k < kQuad; ++k) to[k] = A(1);
  if (size.unit != nullptr) load_quad<kAlign>(to, size.unit + unit, count);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) to[k] *= of_row;
}

// The cotangent of the sizes of the quad at `index` of [B,H] is -dot.
template <int kAlign, typename A>
__device__ __forceinline__ void add_to_units(const StepBar<A>& bar, const A (&dot)[kQuad],
                                             int64_t index, int count) {
  if (bar.unit == nullptr) return;
  A unit[kQuad];
  load_quad<kAlign>(unit, bar.unit + index, count);
#pragma unroll
  for (int k = 0; k < kQuad; ++k) unit[k] -= dot[k];
  store_quad<kAlign>(bar.unit + index, unit, count);
}

template <typename S, int kAlign>
__global__ void __launch_bounds__(kRowUnitThreads, kUnitBlocks) recode_kernel(const Recode<S> p) {
  using A = typename AccumulateIn<S>::type;
  __shared__ A slots_h[kMaxWarps], slots_c[kMaxWarps];
  const int H = static_cast<int>(p.hidden);
  const int64_t row = blockIdx.x, start = row * H;
  const bool recodes_h = p.alpha_h.step != nullptr, recodes_c = p.alpha_c.step != nullptr;
  const bool live = p.live == nullptr || p.live[row];
  const bool active = live && (p.active == nullptr || p.active[row]);
  // An inactive row takes a step of length zero along a gradient of zero.
  const A scale = !active ? A(0) : p.row_scale != nullptr ? p.row_scale[row] : A(1);
  const A row_step_h = step_of_row(p.alpha_h, row), row_step_c = step_of_row(p.alpha_c, row);
  A squares_h = A(0), squares_c = A(0);
  for (int j = first_quad(); j < H; j += quad_stride()) {
    const int count = H - j;
    GateQuad<A> gate;
    A cell[kQuad], hidden[kQuad], c_prev[kQuad], factor[kQuad];
    A dh[kQuad] = {0, 0, 0, 0}, dc[kQuad] = {0, 0, 0, 0};
    A tanh_c[kQuad], new_h[kQuad], new_c[kQuad], alpha_h[kQuad], alpha_c[kQuad];
    load_steps<kAlign>(alpha_h, p.alpha_h, row_step_h, j, count);
    load_steps<kAlign>(alpha_c, p.alpha_c, row_step_c, j, count);
    load_gates<kAlign>(gate, p.gates + 4 * start, H, j, count);
    load_quad<kAlign>(cell, p.c + start + j, count);
    load_quad<kAlign>(hidden, p.h + start + j, count);
    // Not loaded, not multiplied by zero: logits of inactive rows may be anything.
    if (active && p.dh != nullptr) load_quad<kAlign>(dh, p.dh + start + j, count);
    if (active && p.dc != nullptr) load_quad<kAlign>(dc, p.dc + start + j, count);
    dropout_factors(factor, p.dropout, p.time, row, j);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      tanh_c[k] = tanh(cell[k]);
      dh[k] *= scale * factor[k];
      if (p.dc == nullptr) dc[k] = dh[k] * gate.o[k] * (A(1) - tanh_c[k] * tanh_c[k]);
      new_h[k] = recodes_h ? hidden[k] - alpha_h[k] * dh[k] : hidden[k];
      new_c[k] = recodes_c ? cell[k] - alpha_c[k] * dc[k] : cell[k];
      squares_h += dh[k] * dh[k];
      squares_c += dc[k] * dc[k];
    }
    if (recodes_h) store_quad<kAlign>(p.h_recoded + start + j, new_h, count);
    if (recodes_c) store_quad<kAlign>(p.c_recoded + start + j, new_c, count);
    if (p.grad_h != nullptr) store_quad<kAlign>(p.grad_h + start + j, dh, count);
    if (p.grad_c != nullptr) store_quad<kAlign>(p.grad_c + start + j, dc, count);
    if (p.dgates != nullptr) {
      GateQuad<A> d;
      load_quad<kAlign>(c_prev, p.c_prev + start + j, count);
#pragma unroll
      for (int k = 0; k < kQuad; ++k)
        gate_cotangents(d, gate, k, tanh_c[k], c_prev[k], dh[k], dc[k]);
      store_gates<kAlign>(p.dgates + 4 * start, d, H, j, count);
    }
    if (p.h_after != nullptr) {
      A after[kQuad];
#pragma unroll
      for (int k = 0; k < kQuad; ++k)
        after[k] = (recodes_h ? new_h[k] : gate.o[k] * tanh(new_c[k])) * factor[k];
      store_quad<kAlign>(p.h_after + start + j, after, count);
    }
    if (p.h_up != nullptr) {
      dropout_factors(factor, p.up_dropout, p.time, row, j);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) new_h[k] = live ? new_h[k] * factor[k] : A(0);
      store_quad<kAlign>(p.h_up + start + j, new_h, count);
    }
  }
  if (p.norm_h != nullptr) {
    const double sum = sum_block(squares_h, slots_h);
    if (threadIdx.x == 0) p.norm_h[row] = static_cast<A>(sqrt(sum));
  }
  if (p.norm_c != nullptr) {
    const double sum = sum_block(squares_c, slots_c);
    if (threadIdx.x == 0) p.norm_c[row] = static_cast<A>(sqrt(sum));
  }
}

template <typename S, int kAlign>
__global__ void __launch_bounds__(kRowUnitThreads, kUnitBlocks)
    cell_backward_kernel(const CellBackward<S> p) {
  using A = typename AccumulateIn<S>::type;
  __shared__ A slots_h[kMaxWarps], slots_c[kMaxWarps];
  const int H = static_cast<int>(p.hidden);
  const int64_t row = blockIdx.x, start = row * H;
  const bool live = p.live == nullptr || p.live[row];
  A dot_h = A(0), dot_c = A(0);
  for (int j = first_quad(); j < H; j += quad_stride()) {
    const int count = H - j;
    if (!live) {
      // The state was carried over: so are its cotangents. (dc stays as it is.)
      clear_gates<kAlign>(p.dgates + 4 * start, H, j, count);
      if (p.dh_recoded != nullptr)
        copy_quad<kAlign>(p.dh_prev + start + j, p.dh_recoded + start + j, count);
      else
        clear_quad<kAlign>(p.dh_prev + start + j, count);
      continue;
    }
    GateQuad<A> gate, d;
    A c_prev[kQuad], dc[kQuad];
    A recoded[kQuad] = {0, 0, 0, 0}, dh[kQuad] = {0, 0, 0, 0};
    load_gates<kAlign>(gate, p.gates + 4 * start, H, j, count);
    load_quad<kAlign>(c_prev, p.c_prev + start + j, count);
    load_quad<kAlign>(dc, p.dc + start + j, count);
    if (p.dh_recoded != nullptr) load_quad<kAlign>(recoded, p.dh_recoded + start + j, count);
    if (p.dh_up != nullptr) {
      A factor[kQuad];
      load_quad<kAlign>(dh, p.dh_up + start + j, count);
      dropout_factors(factor, p.dropout, p.time, row, j);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) dh[k] *= factor[k];
    }
#pragma unroll
    for (int k = 0; k < kQuad; ++k) dh[k] += recoded[k];
    if (p.grad_h != nullptr) {
      A grad[kQuad];
      load_quad<kAlign>(grad, p.grad_h + start + j, count);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        grad[k] *= p.up_is_recoded ? dh[k] : recoded[k];
        dot_h += grad[k];
      }
      add_to_units<kAlign>(p.step_bar_h, grad, start + j, count);
    }
    if (p.grad_c != nullptr) {
      A grad[kQuad];
      load_quad<kAlign>(grad, p.grad_c + start + j, count);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        grad[k] *= dc[k];
        dot_c += grad[k];
      }
      add_to_units<kAlign>(p.step_bar_c, grad, start + j, count);
    }
    if (p.dh_signal != nullptr) {
      A more[kQuad], factor[kQuad];
      load_quad<kAlign>(more, p.dh_signal + start + j, count);
      dropout_factors(factor, p.signal_dropout, p.time, row, j);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) dh[k] += more[k] * factor[k];
    }
    A c_bar[kQuad] = {0, 0, 0, 0}, c_prev_bar[kQuad] = {0, 0, 0, 0};
    if (p.c_bar != nullptr) load_quad<kAlign>(c_bar, p.c_bar + start + j, count);
    if (p.c_prev_bar != nullptr) load_quad<kAlign>(c_prev_bar, p.c_prev_bar + start + j, count);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const A tanh_c = tanh(gate.f[k] * c_prev[k] + gate.i[k] * gate.g[k]);
      dc[k] += dh[k] * gate.o[k] * (A(1) - tanh_c * tanh_c) + c_bar[k];
      gate_cotangents(d, gate, k, tanh_c, c_prev[k], dh[k], dc[k]);
      dc[k] = dc[k] * gate.f[k] + c_prev_bar[k];
    }
    if (p.gates_bar != nullptr) {
      load_gates<kAlign>(gate, p.gates_bar + 4 * start, H, j, count);
#pragma unroll
      for (int k = 0; k < kQuad; ++k) {
        d.i[k] += gate.i[k];
        d.f[k] += gate.f[k];
        d.g[k] += gate.g[k];
        d.o[k] += gate.o[k];
      }
    }
    store_gates<kAlign>(p.dgates + 4 * start, d, H, j, count);
    store_quad<kAlign>(p.dc + start + j, dc, count);
    if (p.dh_prev != nullptr) clear_quad<kAlign>(p.dh_prev + start + j, count);
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
void launch_cell_forward(cudaStream_t stream, const CellForward<S>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  with_alignment(common_alignment(p.hidden, p.gates, p.c_prev, p.h_prev, p.c, p.h, p.h_up),
                 [&](auto align) {
                   constexpr int kAlign = decltype(align)::value;
                   CUDA_LAUNCH(grid, plan.threads, 0, stream, cell_forward_kernel<S, kAlign>)(p);
                 });
}

template <typename S>
void launch_recode(cudaStream_t stream, const Recode<S>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  with_alignment(common_alignment(p.hidden, p.gates, p.c_prev, p.c, p.h, p.dh, p.dc, p.h_recoded,
                                  p.c_recoded, p.h_up, p.h_after, p.dgates, p.grad_h, p.grad_c,
                                  p.alpha_h.unit, p.alpha_c.unit),
                 [&](auto align) {
                   constexpr int kAlign = decltype(align)::value;
                   CUDA_LAUNCH(grid, plan.threads, 0, stream, recode_kernel<S, kAlign>)(p);
                 });
}

template <typename S>
void launch_cell_backward(cudaStream_t stream, const CellBackward<S>& p, UnitPlan plan) {
  const dim3 grid(p.rows, plan.blocks_per_row);
  with_alignment(
      common_alignment(p.hidden, p.gates, p.c_prev, p.dh_up, p.dh_recoded, p.dc, p.dh_signal,
                       p.gates_bar, p.c_bar, p.c_prev_bar, p.grad_h, p.grad_c, p.dgates, p.dh_prev,
                       p.step_bar_h.unit, p.step_bar_c.unit),
      [&](auto align) {
        constexpr int kAlign = decltype(align)::value;
        CUDA_LAUNCH(grid, plan.threads, 0, stream, cell_backward_kernel<S, kAlign>)(p);
      });
}

template <typename S>
void cell_forward(const Launch& launch, const CellForward<S>& p) {
  launch_cell_forward(static_cast<cudaStream_t>(launch.stream), p, plan_units(p.hidden, false));
}

template <typename S>
void recode(const Launch& launch, const Recode<S>& p) {
  const bool sums = p.norm_h != nullptr || p.norm_c != nullptr;
  launch_recode(static_cast<cudaStream_t>(launch.stream), p, plan_units(p.hidden, sums));
}

template <typename S>
void cell_backward(const Launch& launch, const CellBackward<S>& p) {
  const bool sums = p.step_bar_h.row != nullptr || p.step_bar_c.row != nullptr;
  launch_cell_backward(static_cast<cudaStream_t>(launch.stream), p, plan_units(p.hidden, sums));
}

}  // namespace cuda
}  // namespace fused_recoder
