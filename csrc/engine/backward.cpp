// With detached recoding gradients a recoded state passes its cotangent on unchanged (ds'/ds = I),
// so layers can be walked one after the other, top to bottom, as in a plain LSTM: everything but
// the recurrence itself is a large GEMM over all steps. Exact ones couple the layers of a step, so
// time is the outer loop.
#include "backward.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/zeros_like.h>

#include "../steps/policy.h"

namespace fused_recoder {
namespace {

// One value that autograd has expanded.
bool is_expanded(const at::Tensor& t) {
  bool expanded = true;
  for (int64_t d = 0; d < t.dim(); ++d) expanded = expanded && (t.stride(d) == 0 || t.size(d) == 1);
  return expanded;
}

// Ignored positions have no loss: whatever arrives there is left out. (0 times infinity is not 0.)
at::Tensor counted_only(const at::Tensor& bar, const at::Tensor& targets) {
  return is_expanded(bar) ? bar : bar.masked_fill(targets == kIgnoreTarget, 0);
}

// The value that all counted positions of the per-token weights have in common, if they do: the
// usual case, where the loss is a mean or a sum.
OptionalTensor common_weight(const at::Tensor& weights, const at::Tensor& targets) {
  if (is_expanded(weights)) return weights.flatten()[0];  // no look at the values is needed
  if (!host_reads(weights.device())) return {};
  const at::Tensor counted = weights.masked_select(targets != kIgnoreTarget);
  if (counted.numel() == 0) return at::zeros({}, weights.options());
  const bool same = (counted == counted[0]).all().item<bool>();
  return same ? OptionalTensor(counted[0]) : std::nullopt;
}

// What the gradients at nll and objective give: added to that of output, and the decoder's own.
template <typename S>
void loss_backward(const Problem& p, const Saved& saved, const Cotangents& bar,
                   const at::Tensor& output, at::Tensor& output_bar, LossGradients& decoder) {
  const at::TensorOptions accum = p.accum();
  const auto accumulated = [&](const OptionalTensor& t) {
    return t.has_value() ? counted_only(t->to(accum), p.targets) : at::Tensor();
  };
  at::Tensor nll_bar = accumulated(bar.nll), objective_bar = accumulated(bar.objective);
  if (!p.ensemble) {  // they are one
    if (nll_bar.defined()) objective_bar = nll_bar;
    nll_bar = at::Tensor();
  } else if (nll_bar.defined() && host_reads(nll_bar.device()) &&
             nll_bar.count_nonzero().item<int64_t>() == 0) {
    nll_bar = at::Tensor();  // unused, but materialised by torch.compile
  }
  const bool want_decoder = saved.decoder_weight_grad.defined();
  if (!nll_bar.defined()) {
    // A sum of the objective's gradients, weighted by row: known already.
    const at::Tensor by_row = objective_bar.repeat({1, p.R / p.B}).unsqueeze(2);  // [T,R,1]
    const at::Tensor from_loss = saved.loss_grads * by_row;
    output_bar = output_bar.defined() ? output_bar + from_loss : from_loss;
    if (!want_decoder) return;
    if (const auto weight = common_weight(objective_bar, p.targets)) {
      decoder.weight = saved.decoder_weight_grad * *weight;
      if (saved.decoder_bias_grad.defined()) decoder.bias = saved.decoder_bias_grad * *weight;
      return;
    }
  }
  if (want_decoder) decoder.weight = at::zeros_like(saved.decoder_weight_grad);
  if (saved.decoder_bias_grad.defined()) decoder.bias = at::zeros_like(saved.decoder_bias_grad);
  LossGradients wanted = decoder;
  if (nll_bar.defined()) wanted.states = at::empty({p.T, p.R, p.H}, accum);
  weighted_loss_gradients<S>(p, output, saved.member_log_p, objective_bar, nll_bar, wanted);
  if (wanted.states.defined())
    output_bar = output_bar.defined() ? output_bar + wanted.states : wanted.states;
}

// What went into the gates of layer l at all steps, as W_ih saw it: [T*R, I or H].
at::Tensor layer_input(const Problem& p, const Saved& saved, int64_t l) {
  if (l == 0) return p.input.view({p.T * p.R, p.I});
  const at::Tensor& from = saved.layer_inputs.defined() ? saved.layer_inputs : saved.h;
  return from[l - 1].view({p.T * p.R, p.H});
}

}  // namespace

template <typename S>
Backward<S>::Backward(const Problem& problem, const Saved& saved, const Cotangents& bar,
                      const OptionalTensor& output)
    : p(problem),
      saved(saved),
      kernels(kernels_for<S>(p.device())),
      launch(launch_on(p.device())),
      gates(saved.gates),
      c(saved.c),
      c0(p.c0),
      step_grads(saved.step_grads),
      live(p.live),
      to_hidden(p.L),
      recurrent_masks(p.L),
      grad_weights(p.L),
      grad_input(at::empty({0}, p.storage())) {
  const int64_t T = p.T, R = p.R, H = p.H, L = p.L;
  if (bar.output.has_value()) output_bar = bar.output->to(p.accum()).contiguous();
  const at::Tensor loss_bar = start_from_losses(bar, output);
  const bool exact = p.spec.exact && p.recodes();
  if (exact && p.spec.decoder_grad && !decoder.weight.defined() && !p.decoders.empty())
    decoder = zero_decoder_gradients(p);
  if (exact) through_gradient.emplace(p, typename Signal<S>::Backward{saved, decoder, loss_bar});
  dgates = Buffer<S>({exact ? L : 1, T, R, kGates * H}, p.storage());
  for (int64_t l = 0; l < L; ++l) recurrent_masks[l] = p.recurrent_mask(l);
  const auto start_from = [&](const OptionalTensor& grad) {
    return Buffer<A>(grad.has_value() ? grad->to(p.accum()).contiguous().clone()
                                      : at::zeros({L, R, H}, p.accum()));
  };
  dh = start_from(bar.h_n);
  dc = start_from(bar.c_n);
  carried = Buffer<A>({R, H}, p.accum());
  if (!p.spec.step_grad || !(step_grads || (exact && through_gradient->gives_step_bar()))) return;
  if (p.unit_sizes.defined())
    step_bar.by_unit = Buffer<A>(at::zeros({L, p.spec.states(), R, H}, p.accum()));
  else
    step_bar.by_row = Buffer<A>({L, p.spec.states(), T, R}, p.accum());
}

template <typename S>
at::Tensor Backward<S>::start_from_losses(const Cotangents& bar, const OptionalTensor& output) {
  if (!bar.of_loss()) return {};
  if (p.loss_waits_for_backward()) {
    const at::Tensor loss_bar = (bar.nll.has_value() ? *bar.nll : *bar.objective).to(p.accum());
    return counted_only(loss_bar, p.targets).contiguous();
  }
  loss_backward<S>(p, saved, bar, widen(*output), output_bar, decoder);
  return {};
}

template <typename S>
void Backward<S>::cell(int64_t l, int64_t t, const A* dh_up) {
  CellBackward<S> k{};
  k.rows = p.R;
  k.hidden = p.H;
  k.gates = gates(l, t);
  k.c_prev = t > 0 ? c(l, t - 1) : c0(l);
  k.dh_up = dh_up;
  k.dropout = p.dropout_above(l);
  k.time = p.mask_time(t);
  k.dh_recoded = dh(l);
  k.dc = dc(l);
  k.live = live(t);
  if (step_grads && p.spec.recode_h) {
    k.grad_h = step_grads(l, 0, t);
    k.step_bar_h = step_bar.at(l, 0, t);
  }
  if (step_grads && p.spec.recode_c) {
    k.grad_c = step_grads(l, p.index_of(true), t);
    k.step_bar_c = step_bar.at(l, p.index_of(true), t);
  }
  k.up_is_recoded = l == p.L - 1 && p.output_is_recoded();
  k.dgates = dgates(by_layer(l), t);
  k.dh_prev = live ? carried() : nullptr;
  if (through_gradient) through_gradient->contribute(l, k);
  kernels.cell_backward(launch, k);
  to_state_before(l, k.dgates);
}

template <typename S>
void Backward<S>::to_state_before(int64_t l, const S* dgates_t) {
  at::Tensor dh_l = dh.tensor()[l];
  if (recurrent_masks[l].defined()) {
    to_hidden[l].multiply(p.R, dgates_t, dh(l));
    if (live)
      at::addcmul_out(dh_l, carried.tensor(), dh_l, recurrent_masks[l]);
    else
      dh_l.mul_(recurrent_masks[l]);
    return;
  }
  if (live) dh_l.copy_(carried.tensor());
  to_hidden[l].multiply(p.R, dgates_t, dh(l), nullptr, /*accumulate=*/bool(live));
}

template <typename S>
void Backward<S>::detached() {
  Buffer<A> from_above(output_bar);  // [T,R,H] cotangent of what layer l handed up
  output_bar.reset();
  for (int64_t l = p.L - 1; l >= 0; --l) {
    to_hidden[l] = hidden_matrix(l);
    for (int64_t t = p.T - 1; t >= 0; --t) cell(l, t, from_above(t));
    // Here memory is at its peak: what is of no use any more goes first.
    to_hidden[l] = ConstantMatrix<S>();
    from_above = Buffer<A>();
    weight_gradients(l);
    if (l > 0) from_above = Buffer<A>(below(l));
  }
}

template <typename S>
void Backward<S>::exact() {
  std::vector<ConstantMatrix<S>> to_below(1);  // of layers above the bottom, [4H -> H]
  for (int64_t l = 1; l < p.L; ++l)
    to_below.emplace_back(p.precision, p.layers[l].w_ih, false, p.T, p.R);
  for (int64_t l = 0; l < p.L; ++l) to_hidden[l] = hidden_matrix(l);
  const Buffer<A> up(output_bar), handed_up({p.R, p.H}, p.accum());
  for (int64_t t = p.T - 1; t >= 0; --t) {
    through_gradient->run(t, dh, dc, up(t), step_bar);
    for (int64_t l = p.L - 1; l >= 0; --l) {
      cell(l, t, l == p.L - 1 ? up(t) : handed_up());
      if (l > 0) to_below[l].multiply(p.R, dgates(l, t), handed_up());
    }
  }
  through_gradient->finish();
  for (int64_t l = 0; l < p.L; ++l) weight_gradients(l);
}

template <typename S>
at::Tensor Backward<S>::below(int64_t l) const {
  const at::Tensor& w_ih = p.layers[l].w_ih;
  const at::Tensor down = at::empty({p.T, p.R, w_ih.size(1)}, p.accum());
  ConstantMatrix<S>(p.precision, w_ih, false, 1, p.T * p.R)
      .multiply(p.T * p.R, dgates(by_layer(l)), down.mutable_data_ptr<A>());
  return down;
}

template <typename S>
void Backward<S>::weight_gradients(int64_t l) {
  const int64_t T = p.T, R = p.R, H = p.H;
  const Layer& layer = p.layers[l];
  const at::Tensor d = dgates_of(l);
  const at::Tensor grad_w_ih = at::zeros_like(layer.w_ih), grad_w_hh = at::zeros_like(layer.w_hh);
  add_outer<S>(p.precision, grad_w_ih, d, layer_input(p, saved, l));
  if (through_gradient) through_gradient->add_to_input_weight(l, grad_w_ih);
  const auto recurrent = [&](const at::Tensor& h) {  // [..,R,H], as W_hh saw it
    return recurrent_masks[l].defined() ? h * recurrent_masks[l] : h;
  };
  add_outer<S>(p.precision, grad_w_hh, d.narrow(0, 0, R), recurrent(p.h0[l]));
  if (T > 1)
    add_outer<S>(p.precision, grad_w_hh, d.narrow(0, R, (T - 1) * R),
                 recurrent(saved.h[l].narrow(0, 0, T - 1)).view({(T - 1) * R, H}));
  grad_weights[l] = {grad_w_ih, grad_w_hh};
  if (layer.bias.defined()) {
    grad_weights[l].push_back(d.sum(0, false, p.accum().dtype().toScalarType()));
    grad_weights[l].push_back(grad_weights[l].back().clone());
  }
  if (l == 0 && p.spec.input_grad) grad_input = below(0);
}

template <typename S>
std::vector<at::Tensor> Backward<S>::step_gradients() const {
  if (!p.spec.step_grad || !p.recodes()) return {};
  return make_step_policy<S>(p, /*calls=*/0)
      ->backward({step_bar.by_row.tensor(), step_bar.by_unit.tensor()}, saved);
}

template <typename S>
BackwardResult Backward<S>::run() {
  if (through_gradient)
    exact();
  else
    detached();
  if (p.signal.own_states && p.spec.input_grad) {  // of K copies of the input, each under its mask
    const at::Tensor mask = p.input_mask();
    if (mask.defined()) grad_input.mul_(mask);
    grad_input = grad_input.view({p.T, p.spec.samples, p.B, p.I}).sum(1);
  }
  check_launches(p.device());
  std::vector<at::Tensor> of_weights;
  for (const auto& of_layer : grad_weights)
    for (const at::Tensor& g : of_layer) of_weights.push_back(g.to(p.io_type));
  const auto given = [&](const at::Tensor& t) {
    return (t.defined() ? t : at::empty({0}, p.accum())).to(p.io_type);
  };
  return {grad_input.to(p.io_type),
          dh.tensor().to(p.state_type),
          dc.tensor().to(p.state_type),
          of_weights,
          given(decoder.weight),
          given(decoder.bias),
          step_gradients()};
}

template class Backward<float>;
template class Backward<double>;

}  // namespace fused_recoder
