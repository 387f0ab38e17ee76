#include "exact.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "raw_states.h"

namespace fused_recoder {

template <typename S>
ExactSweep<S>::ExactSweep(const Sequence& sequence, const Saved& saved,
                          const LossGradients& decoder, const at::Tensor& loss_bar)
    : s(sequence),
      kernels(kernels_for<S>(s.input.device())),
      launch(launch_on(s.input.device())),
      gates(saved.gates),
      c(saved.c),
      c0(s.c0),
      grad_h(saved.grad_h),
      alpha(saved.alpha),
      h_bar(s.L) {
  const at::TensorOptions storage = s.input.options(), accum = s.h0.options();
  const int64_t T = s.T, R = s.R, H = s.H, L = s.L;
  if (s.options.classifies()) {
    c_bar = Buffer<A>(at::zeros({L, R, H}, accum));
    return;
  }
  curvature = make_curvature<S>(s, decoder, saved.chosen, loss_bar);
  for (int64_t l = 1; l < L; ++l) to_gates.emplace_back(s.layers[l].w_ih, true, T, R);
  if (L > 1) {
    dgates_bar = Buffer<A>({R, 4 * H}, accum);
    below_bar = Buffer<S>({L - 1, T, R, H}, storage);
    dgates = Buffer<S>({L - 1, T, R, 4 * H}, storage);
  }
  top_gradient_bar = Buffer<S>({R, H}, storage);
  top = Buffer<S>({R, H}, storage);
  top_bar = Buffer<A>({R, H}, accum);
  gates_bar = Buffer<A>({L, R, 4 * H}, accum);
  c_bar = Buffer<A>({L, R, H}, accum);
  c_prev_bar = Buffer<A>({L, R, H}, accum);
}

template <typename S>
void ExactSweep<S>::step(int64_t t, const Buffer<A>& dh, const Buffer<A>& dc, const A* output_bar,
                         const Buffer<A>& step_bar) {
  const Options& o = s.options;
  if (o.classifies()) return classified(t, dh, dc);
  const int64_t index_c = o.recode_h ? 1 : 0;
  for (int64_t l = 0; l < s.L; ++l) {
    const bool is_top = l == s.L - 1;
    if (l > 0) to_gates[l - 1].multiply(s.R, below_bar(l - 1, t), dgates_bar());
    RecodeBackward<S> p{};
    p.rows = s.R;
    p.hidden = s.H;
    p.gates = gates(l, t);
    p.c_prev = t > 0 ? c(l, t - 1) : c0(l);
    p.grad_h = grad_h(l, t);
    p.dh_recoded = dh(l);
    p.dc_recoded = dc(l);
    if (is_top && o.output_is_recoded()) {
      p.dh_up = output_bar;
      p.up_dropout = s.dropout_above(l);
    }
    if (o.recode_h) p.alpha_h = alpha(l, 0, t), p.step_bar_h = step_bar(l, 0, t);
    if (o.recode_c) p.alpha_c = alpha(l, index_c, t), p.step_bar_c = step_bar(l, index_c, t);
    p.dgates_bar = l > 0 ? dgates_bar() : nullptr;
    p.dropout = is_top ? s.signal_dropout() : s.dropout_above(l);
    p.time = s.mask_time(t);
    p.from_above_bar = is_top ? top_gradient_bar() : below_bar(l, t);
    p.h_signal = is_top ? top() : nullptr;
    p.dgates = l > 0 ? dgates(l - 1, t) : nullptr;
    p.gates_bar = gates_bar(l);
    p.c_bar = c_bar(l);
    p.c_prev_bar = c_prev_bar(l);
    kernels.recode_backward(launch, p);
  }
  curvature->backward(t, top(), top_gradient_bar(), top_bar());
}

template <typename S>
void ExactSweep<S>::contribute(int64_t l, CellBackward<S>& p) const {
  p.c_bar = c_bar(l);
  if (h_bar[l].defined()) p.dh_signal = h_bar[l].template const_data_ptr<A>();
  if (s.options.classifies()) return;
  p.gates_bar = gates_bar(l);
  p.c_prev_bar = c_prev_bar(l);
  if (l < s.L - 1) return;
  p.dh_signal = top_bar();
  p.signal_dropout = s.signal_dropout();
}

template <typename S>
void ExactSweep<S>::add_to_input_weight(int64_t l, const at::Tensor& grad_w_ih) const {
  if (l == 0 || s.options.classifies()) return;
  add_outer<S>(grad_w_ih, dgates.tensor()[l - 1].view({s.T * s.R, 4 * s.H}),
               below_bar.tensor()[l - 1].view({s.T * s.R, s.H}));
}

// A classifier's gradient g = C^T (o - onehot) depends on the state it reads alone.
template <typename S>
void ExactSweep<S>::classified(int64_t t, const Buffer<A>& dh, const Buffer<A>& dc) {
  const Options& o = s.options;
  for (at::Tensor& bar : h_bar) bar = at::Tensor();
  c_bar.tensor().zero_();
  for (size_t i = 0; i < s.classifiers.size(); ++i) {
    const int64_t l = o.classifier_states[i] / 2;
    const bool of_c = o.classifier_states[i] % 2 == 1;
    const LinearMap& classifier = s.classifiers[i];
    const RawStates raw = raw_states(gates.tensor()[l][t], t > 0 ? c.tensor()[l][t - 1] : s.c0[l]);
    const at::Tensor& alphas = alpha.tensor()[l][of_c && o.recode_h ? 1 : 0][t];  // [B]
    const at::Tensor v = (of_c ? dc : dh).tensor()[l] * -alphas.unsqueeze(1);     // [B,H]
    const at::Tensor logits =
        at::addmm(classifier.bias, of_c ? raw.c : raw.h, classifier.weight.t());  // [B,C]
    const at::Tensor bar = at::mm(v, classifier.weight.t());                      // [B,C]
    SoftmaxSignalBackward<S> p{};
    p.rows = s.B;
    p.vocab = classifier.weight.size(0);
    p.kind = SignalKind::kNll;
    p.logits = logits.template mutable_data_ptr<A>();
    p.targets = s.labels.template const_data_ptr<int64_t>() + t * s.B;
    p.u_bar = bar.template mutable_data_ptr<A>();
    p.u = logits.template mutable_data_ptr<A>();
    kernels.softmax_signal_backward(launch, p);
    const at::Tensor state_bar = at::mm(bar, classifier.weight);  // [B,H]
    if (of_c)
      c_bar.tensor()[l].add_(state_bar);
    else
      h_bar[l] = state_bar;
  }
}

template class ExactSweep<float>;
template class ExactSweep<double>;

}  // namespace fused_recoder
