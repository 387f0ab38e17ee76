// With detached recoding gradients a recoded state passes its cotangent on unchanged (ds'/ds = I),
// so layers can be walked one after the other, top to bottom, as in a plain LSTM: everything but
// the recurrence itself is a large GEMM over all steps. Exact ones couple the layers of a step, so
// time is the outer loop.
#include "backward.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>

#include "raw_states.h"
#include "step_network.h"

namespace fused_recoder {
namespace {

// The value that all counted positions of the per-token weights have in common, if they do: the
// usual case, where the loss is a mean or a sum.
OptionalTensor common_weight(const at::Tensor& weights, const at::Tensor& targets) {
  // One value that autograd has expanded needs no look at the values.
  bool expanded = true;
  for (int64_t d = 0; d < weights.dim(); ++d)
    expanded = expanded && (weights.stride(d) == 0 || weights.size(d) == 1);
  if (expanded) return weights.flatten()[0];
  if (!host_reads(weights.device())) return {};
  const at::Tensor counted = weights.masked_select(targets != kIgnoreTarget);
  if (counted.numel() == 0) return at::zeros({}, weights.options());
  const bool same = (counted == counted[0]).all().item<bool>();
  return same ? OptionalTensor(counted[0]) : std::nullopt;
}

// What the gradients at nll and objective give: added to that of output, and the decoder's own.
template <typename S>
void loss_backward(const Sequence& s, const Saved& saved, const Cotangents& bar,
                   const at::Tensor& output, at::Tensor& output_bar, LossGradients& decoder) {
  const at::TensorOptions accum = s.h0.options();
  const auto accumulated = [&](const OptionalTensor& t) {
    return t.has_value() ? t->to(accum) : at::Tensor();
  };
  at::Tensor nll_bar = accumulated(bar.nll), objective_bar = accumulated(bar.objective);
  if (!s.ensemble) {  // they are one
    if (nll_bar.defined()) objective_bar = nll_bar;
    nll_bar = at::Tensor();
  } else if (nll_bar.defined() && host_reads(nll_bar.device()) &&
             nll_bar.count_nonzero().item<int64_t>() == 0) {
    nll_bar = at::Tensor();  // unused, but materialised by torch.compile
  }
  const bool want_decoder = saved.decoder_weight_grad.defined();
  if (!nll_bar.defined()) {
    // A sum of the objective's gradients, weighted by row: known already.
    const at::Tensor by_row = objective_bar.repeat({1, s.R / s.B}).unsqueeze(2);  // [T,R,1]
    const at::Tensor from_loss = saved.loss_grads * by_row;
    output_bar = output_bar.defined() ? output_bar + from_loss : from_loss;
    if (!want_decoder) return;
    if (const auto weight = common_weight(objective_bar, s.targets)) {
      decoder.weight = saved.decoder_weight_grad * *weight;
      if (saved.decoder_bias_grad.defined()) decoder.bias = saved.decoder_bias_grad * *weight;
      return;
    }
  }
  if (want_decoder) decoder.weight = at::zeros_like(saved.decoder_weight_grad);
  if (saved.decoder_bias_grad.defined()) decoder.bias = at::zeros_like(saved.decoder_bias_grad);
  LossGradients wanted = decoder;
  if (nll_bar.defined()) wanted.states = at::empty({s.T, s.R, s.H}, accum);
  weighted_loss_gradients<S>(s, output, saved.member_log_p, objective_bar, nll_bar, wanted);
  if (wanted.states.defined())
    output_bar = output_bar.defined() ? output_bar + wanted.states : wanted.states;
}

// What went into the gates of layer l at all steps, as W_ih saw it: [T*R, I or H].
at::Tensor layer_input(const Sequence& s, const Saved& saved, int64_t l) {
  if (l == 0) return s.input.view({s.T * s.R, s.I});
  const at::Tensor& from = saved.layer_inputs.defined() ? saved.layer_inputs : saved.h;
  return from[l - 1].view({s.T * s.R, s.H});
}

}  // namespace

template <typename S>
Backward<S>::Backward(const Sequence& sequence, const Saved& saved, const Cotangents& bar,
                      const OptionalTensor& output, const Wanted& wanted)
    : s(sequence),
      saved(saved),
      wanted(wanted),
      kernels(kernels_for<S>(s.input.device())),
      launch(launch_on(s.input.device())),
      storage(s.input.options()),
      accum(s.h0.options()),
      gates(saved.gates),
      c(saved.c),
      c0(s.c0),
      step_grads(saved.step_grads),
      live(s.live),
      to_hidden(s.L),
      recurrent_masks(s.L),
      grad_weights(s.L),
      grad_input(at::empty({0}, storage)) {
  const Options& o = s.options;
  const int64_t T = s.T, R = s.R, H = s.H, L = s.L;
  const auto accumulated = [&](const OptionalTensor& t) {
    return t.has_value() ? t->to(accum).contiguous() : at::Tensor();
  };
  const bool through_gradient = o.exact && o.recodes();
  output_bar = accumulated(bar.output);
  at::Tensor loss_bar;  // [T,B] left to the curvature
  if (bar.of_loss() && o.loss_waits_for_backward())
    loss_bar = accumulated(bar.nll.has_value() ? bar.nll : bar.objective);
  else if (bar.of_loss())
    loss_backward<S>(s, saved, bar, widen(*output), output_bar, decoder);
  if (through_gradient && wanted.decoder && !decoder.weight.defined()) {
    std::vector<int64_t> shape = {int64_t(s.decoders.size()), s.V, H};
    if (!s.ensemble) shape.erase(shape.begin());
    decoder.weight = at::zeros(shape, accum);
    shape.pop_back();
    if (s.decoders[0].bias.defined()) decoder.bias = at::zeros(shape, accum);
  }
  if (through_gradient) sweep.emplace(s, saved, decoder, loss_bar);
  dgates = Buffer<S>({through_gradient ? L : 1, T, R, 4 * H}, storage);
  for (int64_t l = 0; l < L; ++l) recurrent_masks[l] = s.recurrent_mask(l);
  const auto start_from = [&](const OptionalTensor& grad) {
    return Buffer<A>(grad.has_value() ? grad->to(accum).contiguous().clone()
                                      : at::zeros({L, R, H}, accum));
  };
  dh = start_from(bar.h_n);
  dc = start_from(bar.c_n);
  carried = Buffer<A>({R, H}, accum);
  if (wanted.step && (step_grads || (sweep && !o.classifies())))
    step_bar = Buffer<A>({L, o.states(), T, R}, accum);
}

template <typename S>
void Backward<S>::cell(int64_t l, int64_t t, const A* dh_up) {
  const Options& o = s.options;
  CellBackward<S> p{};
  p.rows = s.R;
  p.hidden = s.H;
  p.gates = gates(l, t);
  p.c_prev = t > 0 ? c(l, t - 1) : c0(l);
  p.dh_up = dh_up;
  p.dropout = s.dropout_above(l);
  p.time = s.mask_time(t);
  p.dh_recoded = dh(l);
  p.dc = dc(l);
  p.live = live(t);
  if (step_grads && o.recode_h) {
    p.grad_h = step_grads(l, 0, t);
    p.step_bar_h = step_bar(l, 0, t);
  }
  if (step_grads && o.recode_c) {
    const int64_t index_c = o.recode_h ? 1 : 0;  // of c among the recoded states
    p.grad_c = step_grads(l, index_c, t);
    p.step_bar_c = step_bar(l, index_c, t);
  }
  p.up_is_recoded = l == s.L - 1 && o.output_is_recoded();
  p.dgates = dgates(by_layer(l), t);
  p.dh_prev = live ? carried() : nullptr;
  if (sweep) sweep->contribute(l, p);
  kernels.cell_backward(launch, p);

  at::Tensor dh_l = dh.tensor()[l];
  if (recurrent_masks[l].defined()) {
    to_hidden[l].multiply(s.R, p.dgates, dh(l));
    if (live)
      at::addcmul_out(dh_l, carried.tensor(), dh_l, recurrent_masks[l]);
    else
      dh_l.mul_(recurrent_masks[l]);
    return;
  }
  if (live) dh_l.copy_(carried.tensor());
  to_hidden[l].multiply(s.R, p.dgates, dh(l), nullptr, /*accumulate=*/bool(live));
}

template <typename S>
void Backward<S>::detached() {
  Buffer<A> from_above(output_bar);  // [T,R,H] cotangent of what layer l handed up
  output_bar.reset();
  for (int64_t l = s.L - 1; l >= 0; --l) {
    to_hidden[l] = hidden_matrix(l);
    for (int64_t t = s.T - 1; t >= 0; --t) cell(l, t, from_above(t));
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
  for (int64_t l = 1; l < s.L; ++l) to_below.emplace_back(s.layers[l].w_ih, false, s.T, s.R);
  for (int64_t l = 0; l < s.L; ++l) to_hidden[l] = hidden_matrix(l);
  const Buffer<A> up(output_bar), handed_up({s.R, s.H}, accum);
  for (int64_t t = s.T - 1; t >= 0; --t) {
    sweep->step(t, dh, dc, up(t), step_bar);
    for (int64_t l = s.L - 1; l >= 0; --l) {
      cell(l, t, l == s.L - 1 ? up(t) : handed_up());
      if (l > 0) to_below[l].multiply(s.R, dgates(l, t), handed_up());
    }
  }
  sweep->finish();
  for (int64_t l = 0; l < s.L; ++l) weight_gradients(l);
}

template <typename S>
at::Tensor Backward<S>::below(int64_t l) const {
  const at::Tensor& w_ih = s.layers[l].w_ih;
  const at::Tensor down = at::empty({s.T, s.R, w_ih.size(1)}, accum);
  ConstantMatrix<S>(w_ih, false, 1, s.T * s.R)
      .multiply(s.T * s.R, dgates(by_layer(l)), down.mutable_data_ptr<A>());
  return down;
}

template <typename S>
void Backward<S>::weight_gradients(int64_t l) {
  const int64_t T = s.T, R = s.R, H = s.H;
  const Layer& layer = s.layers[l];
  const at::Tensor d = dgates_of(l);
  const at::Tensor grad_w_ih = at::zeros_like(layer.w_ih), grad_w_hh = at::zeros_like(layer.w_hh);
  add_outer<S>(grad_w_ih, d, layer_input(s, saved, l));
  if (sweep) sweep->add_to_input_weight(l, grad_w_ih);
  const auto recurrent = [&](const at::Tensor& h) {  // [..,R,H], as W_hh saw it
    return recurrent_masks[l].defined() ? h * recurrent_masks[l] : h;
  };
  add_outer<S>(grad_w_hh, d.narrow(0, 0, R), recurrent(s.h0[l]));
  if (T > 1)
    add_outer<S>(grad_w_hh, d.narrow(0, R, (T - 1) * R),
                 recurrent(saved.h[l].narrow(0, 0, T - 1)).view({(T - 1) * R, H}));
  grad_weights[l] = {grad_w_ih, grad_w_hh};
  if (layer.bias.defined()) {
    grad_weights[l].push_back(d.sum(0, false, accum.dtype().toScalarType()));
    grad_weights[l].push_back(grad_weights[l].back().clone());
  }
  if (l == 0 && wanted.input) grad_input = below(0);
}

template <typename S>
std::vector<at::Tensor> Backward<S>::step_network_gradients() const {
  std::vector<at::Tensor> gradients;
  const int64_t states = s.options.states(), N = s.T * s.R;
  for (int64_t l = 0; l < s.L; ++l) {
    at::Tensor c_prev = s.c0[l].unsqueeze(0);
    if (s.T > 1) c_prev = at::cat({c_prev, saved.c[l].narrow(0, 0, s.T - 1)});
    const RawStates raw = raw_states(saved.gates[l], c_prev);  // forward did not keep them
    for (int64_t i = 0; i < states; ++i) {
      const at::Tensor& state = s.options.recode_h && i == 0 ? raw.h : raw.c;
      const auto of_network =
          step_network_backward(s.step_network[l * states + i], state.reshape({N, s.H}),
                                step_bar.tensor()[l][i].reshape({N}));
      gradients.insert(gradients.end(), of_network.begin(), of_network.end());
    }
  }
  return gradients;
}

template <typename S>
BackwardResult Backward<S>::run() {
  if (sweep)
    exact();
  else
    detached();
  const Options& o = s.options;
  if (o.variational() && wanted.input) {  // of K copies of the input, each under its mask
    const at::Tensor mask = s.input_mask();
    if (mask.defined()) grad_input.mul_(mask);
    grad_input = grad_input.view({s.T, o.samples, s.B, s.I}).sum(1);
  }
  check_launches(accum.device());
  std::vector<at::Tensor> of_weights;
  for (const auto& of_layer : grad_weights)
    for (const at::Tensor& g : of_layer) of_weights.push_back(g.to(s.io_type));
  at::Tensor grad_step = at::empty({0}, accum);
  std::vector<at::Tensor> grad_network;
  if (step_bar && o.step == StepKind::kPredicted)
    grad_network = step_network_gradients();
  else if (step_bar)
    grad_step = step_bar.tensor().sum(at::IntArrayRef{2, 3});
  const auto given = [&](const at::Tensor& t) {
    return (t.defined() ? t : at::empty({0}, accum)).to(s.io_type);
  };
  return {grad_input.to(s.io_type),
          dh.tensor().to(s.state_type),
          dc.tensor().to(s.state_type),
          of_weights,
          given(decoder.weight),
          given(decoder.bias),
          grad_step,
          grad_network};
}

template class Backward<float>;
template class Backward<double>;

namespace {

void check_gradient(const char* name, const OptionalTensor& grad, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(!grad.has_value() || grad->sizes() == shape, name, " must have shape ", shape,
                    ", got ", grad.has_value() ? grad->sizes() : at::IntArrayRef());
}

void check_saved(const Saved& saved, const Sequence& s) {
  const at::ScalarType compute = s.input.scalar_type();
  const auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(t.sizes() == shape && t.is_contiguous() && t.scalar_type() == compute &&
                          t.device() == s.input.device(),
                      "saved tensor ", name,
                      " is not what recode_forward returned for these "
                      "arguments: expected shape ",
                      shape, ", got ", t.sizes());
  };
  check("gates", saved.gates, {s.L, s.T, s.R, 4 * s.H});
  check("h", saved.h, {s.L, s.T, s.R, s.H});
  check("c", saved.c, {s.L, s.T, s.R, s.H});
  if (saved.layer_inputs.defined())
    check("layer_inputs", saved.layer_inputs, {s.L - 1, s.T, s.R, s.H});
  if (saved.step_grads.defined())
    check("step_grads", saved.step_grads, {s.L, s.options.states(), s.T, s.R, s.H});
  if (saved.loss_grads.defined()) check("loss_grads", saved.loss_grads, {s.T, s.R, s.H});
  if (s.options.exact && s.options.recodes()) {
    if (!s.options.classifies()) check("grad_h", saved.grad_h, {s.L, s.T, s.R, s.H});
    check("alpha", saved.alpha, {s.L, s.options.states(), s.T, s.R});
    if (reads_target(s.options.signal)) {
      TORCH_CHECK_VALUE(saved.chosen.defined() && saved.chosen.scalar_type() == at::kLong &&
                            saved.chosen.sizes() == at::IntArrayRef({s.T, s.B}) &&
                            saved.chosen.is_contiguous() &&
                            saved.chosen.device() == s.input.device(),
                        "saved tensor chosen is not what recode_forward returned for these "
                        "arguments: expected int64 of shape [T, B]");
      check_targets_in_range("saved tensor chosen", saved.chosen, s.V);
    }
  }
  if (s.V == 0) return;
  std::vector<int64_t> shape = {int64_t(s.decoders.size()), s.V, s.H};
  if (!s.ensemble) shape.erase(shape.begin());
  if (saved.decoder_weight_grad.defined())
    check("decoder_weight_grad", saved.decoder_weight_grad, shape);
  shape.pop_back();
  if (saved.decoder_bias_grad.defined()) check("decoder_bias_grad", saved.decoder_bias_grad, shape);
  if (s.ensemble && s.options.loss)
    check("member_log_p", saved.member_log_p, {int64_t(s.decoders.size()), s.T, s.B});
}

}  // namespace

BackwardResult recode_backward(
    const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
    const OptionalTensor& grad_c_n, const OptionalTensor& grad_nll,
    const OptionalTensor& grad_objective, at::TensorList saved_list, const at::Tensor& input,
    const at::Tensor& h0, const at::Tensor& c0, at::TensorList weights,
    const OptionalTensor& decoder_weight, const OptionalTensor& decoder_bias,
    at::TensorList classifiers, const at::Tensor& step, at::TensorList step_network,
    const OptionalTensor& targets, const OptionalTensor& labels, const OptionalTensor& lengths,
    const OptionalTensor& seed, const OptionalTensor& output, c10::string_view signal, bool argmax,
    int64_t samples, double sample_p, bool mean_logits, at::IntArrayRef classifier_states,
    bool recode_h, bool recode_c, double dropout, double output_dropout, c10::string_view step_kind,
    int64_t time, bool exact, bool need_input_grad, bool need_step_grad, bool need_decoder_grad) {
  const c10::DeviceGuard guard(input.device());
  const Saved saved = Saved::from_list(saved_list);
  const Cotangents bar{grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective};
  Options options;
  parse_signal(signal, options);
  options.argmax = argmax;
  options.samples = samples;
  options.sample_p = sample_p;
  options.mean_logits = mean_logits;
  options.classifier_states = classifier_states.vec();
  options.recode_h = recode_h;
  options.recode_c = recode_c;
  options.dropout = dropout;
  options.output_dropout = output_dropout;
  options.step = parse_step(step_kind);
  options.time = time;
  options.loss = bar.of_loss();
  options.exact = exact;
  options.backward = true;
  const Sequence s = make_sequence({input,
                                    h0,
                                    c0,
                                    weights,
                                    decoder_weight,
                                    decoder_bias,
                                    classifiers,
                                    step,
                                    step_network,
                                    {},
                                    targets,
                                    labels,
                                    {},
                                    lengths,
                                    seed},
                                   options);
  check_saved(saved, s);
  check_gradient("grad_output", grad_output, {s.T, s.R, s.H});
  check_gradient("grad_h_n", grad_h_n, {s.L, s.R, s.H});
  check_gradient("grad_c_n", grad_c_n, {s.L, s.R, s.H});
  check_gradient("grad_nll", grad_nll, {s.T, s.B});
  check_gradient("grad_objective", grad_objective, {s.T, s.B});
  if (options.loss) {
    TORCH_CHECK_VALUE(saved.loss_grads.defined() || options.loss_waits_for_backward(),
                      "a gradient of the loss was given, but no loss was computed");
    TORCH_CHECK_VALUE(output.has_value(), "output must be given with the gradient of a loss");
    check_gradient("output", output, {s.T, s.R, s.H});
  }
  const Wanted wanted{need_input_grad, need_step_grad, need_decoder_grad};
  return s.input.scalar_type() == at::kDouble
             ? Backward<double>(s, saved, bar, output, wanted).run()
             : Backward<float>(s, saved, bar, output, wanted).run();
}

}  // namespace fused_recoder
