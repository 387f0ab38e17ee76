// The LSTM cell on the CPU: forward, recoding step, backward. Structs: kernels/kernels.h.
#pragma once

#include "simd.h"

namespace fused_recoder {
namespace FR_ISA {

// S == A on the CPU: half precision is widened once per sequence by the engine.
template <typename T>
void cell_forward(const Launch& launch, const CellForward<T>& p) {
  const int64_t H = p.hidden;
  parallel(launch, p.rows, grain_of(8 * H), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T* gates = p.gates + b * 4 * H;  // [4H]
      const T* c_prev = p.c_prev + b * H;
      T* c = p.c + b * H;
      T* h = p.h + b * H;
      T* h_up = p.h_up != nullptr ? p.h_up + b * H : nullptr;
      if (p.live != nullptr && !p.live[b]) {
        memcpy(c, c_prev, H * sizeof(T));
        memcpy(h, p.h_prev + b * H, H * sizeof(T));
        memset(gates, 0, 4 * H * sizeof(T));
        if (h_up != nullptr) memset(h_up, 0, H * sizeof(T));
        continue;
      }
      for_each_vector<T>(H, [&](int64_t j, int n) {
        const Vec<T> i = sigmoid<T>(load(gates + j, n));
        const Vec<T> f = sigmoid<T>(load(gates + H + j, n));
        const Vec<T> g = tanh<T>(load(gates + 2 * H + j, n));
        const Vec<T> o = sigmoid<T>(load(gates + 3 * H + j, n));
        const Vec<T> cell = f * load(c_prev + j, n) + i * g;
        const Vec<T> hidden = o * tanh<T>(cell);
        store(gates + j, i, n);
        store(gates + H + j, f, n);
        store(gates + 2 * H + j, g, n);
        store(gates + 3 * H + j, o, n);
        store(c + j, cell, n);
        store(h + j, hidden, n);
        if (h_up != nullptr)
          store(h_up + j, hidden * dropout_factor<T>(p.dropout, p.time, b, j), n);
      });
    }
  });
}

// Cotangents of the pre-activations, given those of h and c.
template <typename T>
struct GateCotangents {
  Vec<T> i, f, g, o;
};

template <typename T>
FR_INLINE GateCotangents<T> gate_cotangents(Vec<T> i, Vec<T> f, Vec<T> g, Vec<T> o, Vec<T> tanh_c,
                                            Vec<T> c_prev, Vec<T> dh, Vec<T> dc) {
  return {dc * g * i * (T(1) - i), dc * c_prev * f * (T(1) - f), dc * i * (T(1) - g * g),
          dh * tanh_c * o * (T(1) - o)};
}

// Sizes of units [j, j + n) in a row whose own factor is known.
template <typename T>
FR_INLINE Vec<T> step_at(const StepSize<T>& size, T of_row, int64_t j, int n) {
  return size.unit != nullptr ? of_row * load(size.unit + j, n) : splat<T>(of_row);
}

template <typename T>
FR_INLINE T step_of_row(const StepSize<T>& size, int64_t b) {
  return size.step != nullptr ? size.step[b * size.stride] : T(0);
}

// The cotangent of the sizes of units [j, j + n) of row b is -dot.
template <typename T>
FR_INLINE void add_to_units(const StepBar<T>& bar, Vec<T> dot, int64_t b, int64_t H, int64_t j,
                            int n) {
  if (bar.unit == nullptr) return;
  T* unit = bar.unit + b * H + j;
  store(unit, load(unit, n) - dot, n);
}

template <typename T>
void recode(const Launch& launch, const Recode<T>& p) {
  const int64_t H = p.hidden;
  const bool recodes_h = p.alpha_h.step != nullptr, recodes_c = p.alpha_c.step != nullptr;
  parallel(launch, p.rows, grain_of(8 * H), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row = b * H;
      const T* gates = p.gates + 4 * row;                              // [4H]
      T* dgates = p.dgates != nullptr ? p.dgates + 4 * row : nullptr;  // [4H]
      T* h_up = p.h_up != nullptr ? p.h_up + row : nullptr;            // [H]
      T* h_after = p.h_after != nullptr ? p.h_after + row : nullptr;   // [H]
      T* grad_h = p.grad_h != nullptr ? p.grad_h + row : nullptr;      // [H]
      T* grad_c = p.grad_c != nullptr ? p.grad_c + row : nullptr;      // [H]
      const bool live = p.live == nullptr || p.live[b];
      const bool active = live && (p.active == nullptr || p.active[b]);
      // An inactive row takes a step of length zero along a gradient of zero.
      const T scale = !active ? T(0) : p.row_scale != nullptr ? p.row_scale[b] : T(1);
      const T alpha_h = step_of_row(p.alpha_h, b), alpha_c = step_of_row(p.alpha_c, b);
      Vec<T> squares_h{}, squares_c{};
      for_each_vector<T>(H, [&](int64_t j, int n) {
        const Vec<T> o = load(gates + 3 * H + j, n);
        const Vec<T> cell = load(p.c + row + j, n);
        const Vec<T> hidden = load(p.h + row + j, n);
        const Vec<T> mask = dropout_factor<T>(p.dropout, p.time, b, j);
        const Vec<T> tanh_c = tanh<T>(cell);
        // Selected, not multiplied by zero: logits of inactive rows may be anything.
        const Vec<T> dh =
            active && p.dh != nullptr ? load(p.dh + row + j, n) * scale * mask : Vec<T>{};
        const Vec<T> dc = p.dc == nullptr ? dh * o * (T(1) - tanh_c * tanh_c)
                          : active        ? load(p.dc + row + j, n)
                                          : Vec<T>{};
        const Vec<T> new_h = recodes_h ? hidden - step_at(p.alpha_h, alpha_h, j, n) * dh : hidden;
        const Vec<T> new_c = recodes_c ? cell - step_at(p.alpha_c, alpha_c, j, n) * dc : cell;
        if (recodes_h) store(p.h_recoded + row + j, new_h, n);
        if (recodes_c) store(p.c_recoded + row + j, new_c, n);
        if (h_up != nullptr)
          store(h_up + j, live ? new_h * dropout_factor<T>(p.up_dropout, p.time, b, j) : Vec<T>{},
                n);
        if (h_after != nullptr)
          store(h_after + j, (recodes_h ? new_h : o * tanh<T>(new_c)) * mask, n);
        if (grad_h != nullptr) store(grad_h + j, dh, n);
        if (grad_c != nullptr) store(grad_c + j, dc, n);
        squares_h += dh * dh;
        squares_c += dc * dc;
        if (dgates != nullptr) {
          const GateCotangents<T> d = gate_cotangents<T>(load(gates + j, n), load(gates + H + j, n),
                                                         load(gates + 2 * H + j, n), o, tanh_c,
                                                         load(p.c_prev + row + j, n), dh, dc);
          store(dgates + j, d.i, n);
          store(dgates + H + j, d.f, n);
          store(dgates + 2 * H + j, d.g, n);
          store(dgates + 3 * H + j, d.o, n);
        }
      });
      if (p.norm_h != nullptr) p.norm_h[b] = sqrt(sum<T>(squares_h));
      if (p.norm_c != nullptr) p.norm_c[b] = sqrt(sum<T>(squares_c));
    }
  });
}

// a_h, a_c: the gradients d(delta)/d(h), d(delta)/d(c); X_bar: the cotangent of X; G: dgates_bar.
// Each line below is the transpose of a product in recode().
template <typename T>
void recode_backward(const Launch& launch, const RecodeBackward<T>& p) {
  const int64_t H = p.hidden;
  const bool sends_below = p.dgates_bar != nullptr;
  parallel(launch, p.rows, grain_of(16 * H), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row = b * H;
      const T *gates = p.gates + 4 * row, *G = sends_below ? p.dgates_bar + 4 * row : nullptr;
      T* gates_bar = p.gates_bar + 4 * row;                            // [4H]
      T* dgates = p.dgates != nullptr ? p.dgates + 4 * row : nullptr;  // [4H]
      const T alpha_h = step_of_row(p.alpha_h, b), alpha_c = step_of_row(p.alpha_c, b);
      Vec<T> dot_h{}, dot_c{};
      for_each_vector<T>(H, [&](int64_t j, int n) {
        const Vec<T> i = load(gates + j, n), f = load(gates + H + j, n);
        const Vec<T> g = load(gates + 2 * H + j, n), o = load(gates + 3 * H + j, n);
        const Vec<T> c_prev = load(p.c_prev + row + j, n);
        const Vec<T> tanh_c = tanh<T>(f * c_prev + i * g);
        const Vec<T> slope = T(1) - tanh_c * tanh_c;
        const Vec<T> a_h = load(p.grad_h + row + j, n), a_c = a_h * o * slope;
        const Vec<T> mask = dropout_factor<T>(p.dropout, p.time, b, j);

        Vec<T> h_bar = load(p.dh_recoded + row + j, n);
        if (p.dh_up != nullptr)
          h_bar += load(p.dh_up + row + j, n) * dropout_factor<T>(p.up_dropout, p.time, b, j);
        const Vec<T> c_bar = load(p.dc_recoded + row + j, n);
        const Vec<T> in_h = a_h * h_bar, in_c = a_c * c_bar;
        dot_h += in_h;
        dot_c += in_c;
        add_to_units(p.step_bar_h, in_h, b, H, j, n);
        add_to_units(p.step_bar_c, in_c, b, H, j, n);
        Vec<T> a_h_bar = -step_at(p.alpha_h, alpha_h, j, n) * h_bar;
        Vec<T> a_c_bar = -step_at(p.alpha_c, alpha_c, j, n) * c_bar;

        Vec<T> i_bar{}, f_bar{}, g_bar{}, o_bar{}, tanh_bar{}, c_prev_bar{};
        if (sends_below) {
          const Vec<T> G_i = load(G + j, n), G_f = load(G + H + j, n);
          const Vec<T> G_g = load(G + 2 * H + j, n), G_o = load(G + 3 * H + j, n);
          const Vec<T> di = i * (T(1) - i), df = f * (T(1) - f), dg = T(1) - g * g;
          const Vec<T> d_o = o * (T(1) - o);
          // d_i = a_c g i (1 - i)
          a_c_bar += G_i * g * di;
          g_bar += G_i * a_c * di;
          i_bar += G_i * a_c * g * (T(1) - T(2) * i);
          // d_f = a_c c_prev f (1 - f)
          a_c_bar += G_f * c_prev * df;
          c_prev_bar += G_f * a_c * df;
          f_bar += G_f * a_c * c_prev * (T(1) - T(2) * f);
          // d_g = a_c i (1 - g^2)
          a_c_bar += G_g * i * dg;
          i_bar += G_g * a_c * dg;
          g_bar -= T(2) * G_g * a_c * i * g;
          // d_o = a_h tanh(c) o (1 - o)
          a_h_bar += G_o * tanh_c * d_o;
          tanh_bar += G_o * a_h * d_o;
          o_bar += G_o * a_h * tanh_c * (T(1) - T(2) * o);
          if (dgates != nullptr) {
            store(dgates + j, a_c * g * di, n);
            store(dgates + H + j, a_c * c_prev * df, n);
            store(dgates + 2 * H + j, a_c * i * dg, n);
            store(dgates + 3 * H + j, a_h * tanh_c * d_o, n);
          }
          i_bar *= di;
          f_bar *= df;
          g_bar *= dg;
        }
        // a_c = a_h o (1 - tanh(c)^2)
        a_h_bar += a_c_bar * o * slope;
        o_bar += a_c_bar * a_h * slope;
        tanh_bar -= T(2) * a_c_bar * a_h * o * tanh_c;

        store(p.from_above_bar + row + j, a_h_bar * mask, n);
        if (p.h_signal != nullptr) store(p.h_signal + row + j, o * tanh_c * mask, n);
        store(gates_bar + j, i_bar, n);
        store(gates_bar + H + j, f_bar, n);
        store(gates_bar + 2 * H + j, g_bar, n);
        store(gates_bar + 3 * H + j, o_bar * o * (T(1) - o), n);
        store(p.c_bar + row + j, tanh_bar * slope, n);
        store(p.c_prev_bar + row + j, c_prev_bar, n);
      });
      if (p.step_bar_h.row != nullptr) p.step_bar_h.row[b] = -sum<T>(dot_h);
      if (p.step_bar_c.row != nullptr) p.step_bar_c.row[b] = -sum<T>(dot_c);
    }
  });
}

template <typename T>
void trial_step(const Launch& launch, const TrialStep<T>& p) {
  const int64_t H = p.hidden;
  parallel(launch, p.rows, grain_of(8 * H), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row = b * H;
      const T scale = p.row_scale != nullptr ? p.row_scale[b] : T(1);
      const T alpha = p.alpha[b];
      for_each_vector<T>(H, [&](int64_t j, int n) {
        const Vec<T> mask = dropout_factor<T>(p.dropout, p.time, b, j);
        const Vec<T> dh = load(p.dh + row + j, n) * scale * mask;
        Vec<T> trial;
        if (p.recodes_h) {
          trial = load(p.h + row + j, n) - alpha * dh;
        } else {
          const Vec<T> o = load(p.gates + 4 * row + 3 * H + j, n);
          const Vec<T> cell = load(p.c + row + j, n);
          const Vec<T> tanh_c = tanh<T>(cell);
          trial = o * tanh<T>(cell - alpha * (dh * o * (T(1) - tanh_c * tanh_c)));
        }
        store(p.trial + row + j, trial * mask, n);
      });
    }
  });
}

template <typename T>
void trial_verdict(const Launch&, const TrialVerdict<T>& p) {
  for (int64_t b = 0; b < p.rows; ++b) {
    if (p.settled[b]) continue;
    if (p.trial_delta[b] < p.delta[b])
      p.settled[b] = 1;
    else
      for (int64_t k = 0; k < p.samples; ++k) p.alpha[k * p.rows + b] *= p.shrink;
  }
}

template <typename T>
void gate(const Launch&, const Gate<T>& p) {
  for (int64_t b = 0; b < p.rows; ++b) {
    const bool open = (p.active == nullptr || p.active[b]) && p.delta[b] > *p.threshold;
    for (int64_t k = 0; k < p.samples; ++k) p.open[k * p.rows + b] = open;
  }
}

template <typename T>
void cell_backward(const Launch& launch, const CellBackward<T>& p) {
  const int64_t H = p.hidden;
  parallel(launch, p.rows, grain_of(8 * H), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const T* gates = p.gates + b * 4 * H;  // [4H]
      T* dgates = p.dgates + b * 4 * H;      // [4H]
      const int64_t row = b * H;
      if (p.live != nullptr && !p.live[b]) {
        // The state was carried over: so are its cotangents. (dc stays as it is.)
        memset(dgates, 0, 4 * H * sizeof(T));
        if (p.dh_recoded != nullptr)
          memcpy(p.dh_prev + row, p.dh_recoded + row, H * sizeof(T));
        else
          memset(p.dh_prev + row, 0, H * sizeof(T));
        if (p.step_bar_h.row != nullptr) p.step_bar_h.row[b] = T(0);
        if (p.step_bar_c.row != nullptr) p.step_bar_c.row[b] = T(0);
        continue;
      }
      Vec<T> dot_h{}, dot_c{};
      for_each_vector<T>(H, [&](int64_t j, int n) {
        const Vec<T> i = load(gates + j, n);
        const Vec<T> f = load(gates + H + j, n);
        const Vec<T> g = load(gates + 2 * H + j, n);
        const Vec<T> o = load(gates + 3 * H + j, n);
        const Vec<T> c_prev = load(p.c_prev + row + j, n);
        const Vec<T> tanh_c = tanh<T>(f * c_prev + i * g);
        const Vec<T> recoded = p.dh_recoded != nullptr ? load(p.dh_recoded + row + j, n) : Vec<T>{};
        const Vec<T> up = p.dh_up != nullptr ? load(p.dh_up + row + j, n) *
                                                   dropout_factor<T>(p.dropout, p.time, b, j)
                                             : Vec<T>{};
        Vec<T> dh = recoded + up;
        const Vec<T> dc_recoded = load(p.dc + row + j, n);
        if (p.grad_h != nullptr) {
          const Vec<T> in_h = load(p.grad_h + row + j, n) * (p.up_is_recoded ? dh : recoded);
          dot_h += in_h;
          add_to_units(p.step_bar_h, in_h, b, H, j, n);
        }
        if (p.grad_c != nullptr) {
          const Vec<T> in_c = load(p.grad_c + row + j, n) * dc_recoded;
          dot_c += in_c;
          add_to_units(p.step_bar_c, in_c, b, H, j, n);
        }
        if (p.dh_signal != nullptr)
          dh += load(p.dh_signal + row + j, n) * dropout_factor<T>(p.signal_dropout, p.time, b, j);
        Vec<T> dc = dc_recoded + dh * o * (T(1) - tanh_c * tanh_c);
        if (p.c_bar != nullptr) dc += load(p.c_bar + row + j, n);
        GateCotangents<T> d = gate_cotangents<T>(i, f, g, o, tanh_c, c_prev, dh, dc);
        if (p.gates_bar != nullptr) {
          const T* more = p.gates_bar + 4 * row;  // [4H]
          d.i += load(more + j, n);
          d.f += load(more + H + j, n);
          d.g += load(more + 2 * H + j, n);
          d.o += load(more + 3 * H + j, n);
        }
        Vec<T> dc_prev = dc * f;
        if (p.c_prev_bar != nullptr) dc_prev += load(p.c_prev_bar + row + j, n);
        store(dgates + j, d.i, n);
        store(dgates + H + j, d.f, n);
        store(dgates + 2 * H + j, d.g, n);
        store(dgates + 3 * H + j, d.o, n);
        store(p.dc + row + j, dc_prev, n);
        if (p.dh_prev != nullptr) store(p.dh_prev + row + j, Vec<T>{}, n);
      });
      if (p.step_bar_h.row != nullptr) p.step_bar_h.row[b] = -sum<T>(dot_h);
      if (p.step_bar_c.row != nullptr) p.step_bar_c.row[b] = -sum<T>(dot_c);
    }
  });
}

template <typename T>
void dropout_mask(const Launch& launch, const DropoutMask<T>& p) {
  parallel(launch, p.rows, grain_of(p.units), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T* out = p.out + b * p.units;  // [units]
      for (int64_t quad = 0; 4 * quad < p.units; ++quad) {
        T factor[4];
        dropout_quad<T>(p.dropout, p.time, p.sample, static_cast<uint32_t>(b),
                        static_cast<uint32_t>(quad), factor);
        for (int i = 0; i < 4 && 4 * quad + i < p.units; ++i) out[4 * quad + i] = factor[i];
      }
    }
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
