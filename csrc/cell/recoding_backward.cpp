#include "recoding_backward.h"

#include "lstm.h"

namespace fused_recoder {

template <typename S>
RecodingBackward<S>::RecodingBackward(const Problem& problem,
                                      const typename Signal<S>::Backward& pass)
    : p(problem),
      kernels(kernels_for<S>(p.device())),
      launch(launch_on(p.device())),
      signal(make_signal<S>(p)),
      gates(pass.saved.gates),
      c(pass.saved.c),
      c0(p.c0),
      grad_h(pass.saved.grad_h),
      alpha(pass.saved.alpha),
      unit_sizes(p.unit_sizes) {
  signal->begin_backward(pass);
  if (!signal->descends()) return;
  const int64_t T = p.T, R = p.R, H = p.H, L = p.L, G = kGates * H;
  for (int64_t l = 1; l < L; ++l) to_gates.emplace_back(p.precision, p.layers[l].w_ih, true, T, R);
  if (L > 1) {
    dgates_bar = Buffer<A>({R, G}, p.accum());
    below_bar = Buffer<S>({L - 1, T, R, H}, p.storage());
    dgates = Buffer<S>({L - 1, T, R, G}, p.storage());
  }
  top_gradient_bar = Buffer<S>({R, H}, p.storage());
  top = Buffer<S>({R, H}, p.storage());
  top_bar = Buffer<A>({R, H}, p.accum());
  gates_bar = Buffer<A>({L, R, G}, p.accum());
  c_bar = Buffer<A>({L, R, H}, p.accum());
  c_prev_bar = Buffer<A>({L, R, H}, p.accum());
}

template <typename S>
void RecodingBackward<S>::run(int64_t t, const Buffer<A>& dh, const Buffer<A>& dc,
                              const A* output_bar, const StepBarBuffers<A>& step_bar) {
  if (!signal->descends()) return signal->curvature_of_states(t, dh, dc);
  const int64_t of_c = p.index_of(true);
  for (int64_t l = 0; l < p.L; ++l) {
    if (l > 0) to_gates[l - 1].multiply(p.R, below_bar(l - 1, t), dgates_bar());
    RecodeBackward<S> k = cell(l, t);
    k.dh_recoded = dh(l);
    k.dc_recoded = dc(l);
    if (l == p.L - 1 && p.output_is_recoded()) {
      k.dh_up = output_bar;
      k.up_dropout = p.dropout_above(l);
    }
    if (p.spec.recode_h) k.step_bar_h = step_bar.at(l, 0, t);
    if (p.spec.recode_c) k.step_bar_c = step_bar.at(l, of_c, t);
    kernels.recode_backward(launch, k);
  }
  signal->curvature(t, top(), top_gradient_bar(), top_bar());
}

// What does not depend on what arrives.
template <typename S>
RecodeBackward<S> RecodingBackward<S>::cell(int64_t l, int64_t t) const {
  const bool is_top = l == p.L - 1;
  RecodeBackward<S> k{};
  k.rows = p.R;
  k.hidden = p.H;
  k.gates = gates(l, t);
  k.c_prev = t > 0 ? c(l, t - 1) : c0(l);
  k.grad_h = grad_h(l, t);
  const int64_t of_c = p.index_of(true);
  if (p.spec.recode_h) k.alpha_h = {alpha(l, 0, t), 1, unit_sizes(l, 0)};
  if (p.spec.recode_c) k.alpha_c = {alpha(l, of_c, t), 1, unit_sizes(l, of_c)};
  k.dgates_bar = l > 0 ? dgates_bar() : nullptr;
  k.dropout = is_top ? p.signal_dropout() : p.dropout_above(l);
  k.time = p.mask_time(t);
  k.from_above_bar = is_top ? top_gradient_bar() : below_bar(l, t);
  k.h_signal = is_top ? top() : nullptr;
  k.dgates = l > 0 ? dgates(l - 1, t) : nullptr;
  k.gates_bar = gates_bar(l);
  k.c_bar = c_bar(l);
  k.c_prev_bar = c_prev_bar(l);
  return k;
}

template <typename S>
void RecodingBackward<S>::contribute(int64_t l, CellBackward<S>& cell) const {
  if (!signal->descends()) return signal->contribute(l, cell);
  cell.c_bar = c_bar(l);
  cell.gates_bar = gates_bar(l);
  cell.c_prev_bar = c_prev_bar(l);
  if (l < p.L - 1) return;
  cell.dh_signal = top_bar();
  cell.signal_dropout = p.signal_dropout();
}

template <typename S>
void RecodingBackward<S>::add_to_input_weight(int64_t l, const at::Tensor& grad_w_ih) const {
  if (l == 0 || !signal->descends()) return;
  add_outer<S>(p.precision, grad_w_ih, dgates.tensor()[l - 1].view({p.T * p.R, kGates * p.H}),
               below_bar.tensor()[l - 1].view({p.T * p.R, p.H}));
}

template class RecodingBackward<float>;
template class RecodingBackward<double>;

}  // namespace fused_recoder
