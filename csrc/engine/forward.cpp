#include "forward.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

namespace fused_recoder {

template <typename S>
Forward<S>::Forward(const Sequence& sequence, const Keep& keep, int64_t expected_calls,
                    std::unique_ptr<SignalStage<S>> own_stage)
    : s(sequence),
      save(keep.states),
      trace(keep.trace && s.options.recodes()),
      recodes_h(s.options.recodes() && s.options.recode_h),
      recodes_c(s.options.recodes() && s.options.recode_c),
      output_is_raw(recodes_h && !s.options.output_is_recoded() && s.options.output_p() == 0 &&
                    !s.live.defined()),
      kernels(kernels_for<S>(s.input.device())),
      launch(launch_on(s.input.device())),
      storage(s.input.options()),
      accum(s.h0.options()),
      h0(s.h0),
      c0(s.c0),
      live(s.live),
      active(s.active) {
  const Options& o = s.options;
  const int64_t T = s.T, B = s.B, R = s.R, H = s.H, L = s.L, states = o.states();
  const int64_t calls = expected_calls > 0 ? expected_calls : T;
  output = Buffer<S>({T, R, H}, storage);
  h = Buffer<S>({L, save ? T : 2, R, H}, storage);
  c = Buffer<A>({L, save ? T : 2, R, H}, accum);
  gates = Buffer<A>({L, save ? T : 1, R, 4 * H}, accum);
  projected = save ? Buffer<A>(gates.tensor()[0]) : Buffer<A>({T, R, 4 * H}, accum);
  if (L > 1 && (recodes_h || drops_between_layers()))
    layer_inputs = Buffer<S>({L - 1, save ? T : 1, R, H}, storage);
  for (int64_t l = 0; l < L; ++l) {
    const Layer& layer = s.layers[l];
    from_hidden.emplace_back(layer.w_hh, true, calls, R);
    from_below.push_back(l > 0 ? ConstantMatrix<S>(layer.w_ih, true, calls, R)
                               : ConstantMatrix<S>(layer.w_ih, true, calls / T, T * R));
    to_below.push_back(l > 0 && o.recodes() && !o.classifies()
                           ? ConstantMatrix<S>(layer.w_ih, false, calls, R)
                           : ConstantMatrix<S>());
  }
  if (o.variational() && o.sample_p > 0) h_masked = Buffer<S>({R, H}, storage);
  delta = Buffer<A>(at::zeros({T, B}, accum));
  if (o.loss && save && !o.loss_waits_for_backward()) {
    loss_grads = Buffer<A>({T, R, H}, accum);
    if (keep.decoder_grads) {
      std::vector<int64_t> shape = {int64_t(s.decoders.size()), s.V, H};
      if (!s.ensemble) shape.erase(shape.begin());
      decoder_grads.weight = at::zeros(shape, accum);
      shape.pop_back();
      if (s.decoders[0].bias.defined()) {
        decoder_grads.bias = at::zeros(shape, accum);
        decoder_grads.bias_sum = at::empty({s.V}, accum);
      }
    }
  }
  if (!o.recodes()) return;

  if (recodes_h) h_raw = Buffer<S>({L, R, H}, storage);
  if (recodes_c) c_raw = Buffer<A>({L, R, H}, accum);
  if (o.output_is_recoded()) decoder_input = Buffer<S>({R, H}, storage);
  dh = Buffer<A>({R, H}, accum);
  if (L > 1) dgates = Buffer<S>({R, 4 * H}, storage);
  step = Buffer<A>(s.step);
  const bool backtracks = o.step == StepKind::kBacktracking;
  if (o.step == StepKind::kPredicted) {
    for (const auto& maps : s.step_network) step_network.emplace_back(maps, calls, R);
    sizes = Buffer<A>({L, states, T, R}, accum);
  } else if (backtracks) {
    sizes = Buffer<A>({1, 1, T, R}, accum);
    settled = Buffer<uint8_t>({B}, accum.dtype(at::kByte));
  }
  if (backtracks || trace) {
    trial = Buffer<S>({R, H}, storage);
    trial_delta = Buffer<A>({B}, accum);
  }
  if (s.gate.defined()) open = Buffer<uint8_t>({T, R}, accum.dtype(at::kByte));
  const bool differentiates_gradient = save && o.exact && !o.classifies();
  if (differentiates_gradient)
    grad_h = Buffer<A>({L, T, R, H}, accum);
  else if (save && keep.step_grads)
    step_grads = Buffer<A>({L, states, T, R, H}, accum);
  if (differentiates_gradient && reads_target(o.signal))
    shared.chosen = Buffer<int64_t>({T, B}, accum.dtype(at::kLong));
  if (trace) {
    delta_after = Buffer<A>(at::zeros({T, B}, accum));
    grad_norm = Buffer<A>({L, states, T, R}, accum);
  }
  if (o.classifies()) {
    classifiers = std::make_unique<Classifiers<S>>(s);
    no_gradient = Buffer<A>(at::zeros({R, H}, accum));
    return;
  }
  if (own_stage) {
    stage = std::move(own_stage);
    return;
  }
  if (o.loss_shares_gradient()) {
    shared.log_p = Buffer<A>({T, B}, accum);
    shared.loss_grads = loss_grads;
    shared.output = output;
    shared.gradients = decoder_grads;
  }
  stage =
      o.mixes() ? make_mixture_stage<S>(s) : make_decoder_stage<S>(s, shared, backtracks || trace);
}

// All layers of step t.
template <typename S>
void Forward<S>::cells(int64_t t) {
  for (int64_t l = 0; l < s.L; ++l) {
    A* gates_t = gates_of(l, t);
    if (l > 0) from_below[l].multiply(s.R, above(l - 1, t), gates_t, bias_of(l));
    const S* recurrent = h_before(l, t);
    if (h_masked) {
      MaskRows<S> m{};
      m.samples = 1;
      m.rows = s.R;
      m.units = s.H;
      m.dropout = s.dropout_of(kRecurrentStream + l, s.options.sample_p);
      m.in = recurrent;
      m.out = h_masked();
      kernels.mask_rows(launch, m);
      recurrent = h_masked();
    }
    from_hidden[l].multiply(s.R, recurrent, gates_t, nullptr, /*accumulate=*/true);

    CellForward<S> p{};
    p.rows = s.R;
    p.hidden = s.H;
    p.gates = gates_t;
    p.c_prev = c_before(l, t);
    p.h_prev = h_before(l, t);
    p.live = live(t);
    p.h = raw_h(l, t);
    p.c = raw_c(l, t);
    p.h_up = up(l, t);
    p.dropout = s.dropout_above(l);
    p.time = s.mask_time(t);
    kernels.cell_forward(launch, p);
  }
}

template <typename S>
StepSize<typename AccumulateIn<S>::type> Forward<S>::step_of(int64_t l, int64_t state,
                                                             int64_t t) const {
  switch (s.options.step) {
    case StepKind::kPredicted:
      return {sizes(l, state, t), 1};
    case StepKind::kBacktracking:
      return {sizes(0, 0, t), 1};
    default:
      return {step(l, state), 0};
  }
}

// Predicts the step sizes of all states, or searches for one that lowers the signal.
template <typename S>
void Forward<S>::choose_steps(int64_t t, const typename SignalStage<S>::Gradient& gradient) {
  const Options& o = s.options;
  if (o.step == StepKind::kPredicted) {
    const int64_t states = o.states();
    for (int64_t l = 0; l < s.L; ++l) {
      if (o.recode_h) step_network[l * states].predict(raw_h(l, t), sizes(l, 0, t));
      if (o.recode_c)
        step_network[l * states + index_c()].predict(raw_c(l, t), sizes(l, index_c(), t));
    }
    at::Tensor at_t = sizes.tensor().select(2, t);  // [L,S,R]
    at::softplus_out(at_t, at_t);
  }
  if (o.step != StepKind::kBacktracking) return;
  settled.tensor().zero_();
  sizes.tensor()[0][0][t].copy_(s.step[0][0].expand({s.R}));
  for (int64_t i = 1; i <= o.trials; ++i) {
    if (classifiers) {
      const at::Tensor alpha = sizes.tensor()[0][0][t].unsqueeze(1);  // [B,1]
      for (int64_t k = 0; k < classifiers->count(); ++k) {
        const int64_t l = classifiers->layer(k);
        A* raw = classifiers->reads_c(k) ? raw_c(l, t) : raw_h(l, t);
        at::Tensor stepped = trial.tensor();
        at::addcmul_out(stepped, tensor_at(raw, {s.R, s.H}, accum.device()), alpha,
                        classifiers->gradient(k), -1);
        classifiers->add(k, t, stepped, trial_delta.tensor(), false);
      }
    } else {
      TrialStep<S> p{};
      p.rows = s.R;
      p.hidden = s.H;
      p.gates = gates_of(s.L - 1, t);
      p.c = raw_c(s.L - 1, t);
      p.h = raw_h(s.L - 1, t);
      p.dh = gradient.dh;
      p.row_scale = gradient.row_scale;
      p.dropout = s.signal_dropout();
      p.time = s.mask_time(t);
      p.recodes_h = o.recode_h;
      p.alpha = sizes(0, 0, t);
      p.trial = trial();
      kernels.trial_step(launch, p);
      stage->value(t, trial(), trial_delta());
    }
    const A shrink = i == o.trials ? A(0) : A(o.shrink);
    kernels.trial_verdict(launch, TrialVerdict<A>{s.R / s.B, s.B, delta(t), trial_delta(), shrink,
                                                  settled(), sizes(0, 0, t)});
    // Looking ends the search early; where looking would synchronise, all trials are made.
    if (host_reads(accum.device()) && settled.tensor().all().template item<bool>()) break;
  }
}

template <typename S>
void Forward<S>::open_gate(int64_t t) {
  if (!open) return;
  kernels.gate(launch,
               Gate<A>{s.R / s.B, s.B, delta(t), s.gate.const_data_ptr<A>(), active(t), open(t)});
}

template <typename S>
Recode<S> Forward<S>::recode_layer(int64_t l, int64_t t) const {
  const Options& o = s.options;
  const bool top = l == s.L - 1;
  Recode<S> p{};
  p.rows = s.R;
  p.hidden = s.H;
  p.gates = gates_of(l, t);
  p.c_prev = c_before(l, t);
  p.c = raw_c(l, t);
  p.h = raw_h(l, t);
  p.time = s.mask_time(t);
  p.active = active_of(t);
  p.live = live(t);
  p.h_recoded = h(l, slot(t));
  p.c_recoded = c(l, slot(t));
  if (top && o.output_is_recoded()) {
    p.h_up = output(t);
    p.up_dropout = s.dropout_above(l);
  }
  if (top && trace) p.h_after = trial();
  if (o.recode_h) {
    p.alpha_h = step_of(l, 0, t);
    p.grad_h = step_grads(l, 0, t);
    p.norm_h = grad_norm(l, 0, t);
  }
  if (o.recode_c) {
    p.alpha_c = step_of(l, index_c(), t);
    p.grad_c = step_grads(l, index_c(), t);
    p.norm_c = grad_norm(l, index_c(), t);
  }
  if (grad_h) p.grad_h = grad_h(l, t);
  return p;
}

template <typename S>
void Forward<S>::recode(int64_t t) {
  if (classifiers)
    recode_classified(t);
  else
    recode_decoded(t);
}

// The signal's gradient goes down the layers of step t.
template <typename S>
void Forward<S>::recode_decoded(int64_t t) {
  const auto gradient = stage->gradient(t, signal_input(t), delta(t));
  open_gate(t);
  choose_steps(t, gradient);
  for (int64_t l = s.L - 1; l >= 0; --l) {
    const bool top = l == s.L - 1;
    Recode<S> p = recode_layer(l, t);
    p.dh = top ? gradient.dh : dh();
    p.row_scale = top ? gradient.row_scale : nullptr;
    p.dropout = top ? s.signal_dropout() : s.dropout_above(l);
    p.dgates = l > 0 ? dgates() : nullptr;
    kernels.recode(launch, p);
    if (l > 0) to_below[l].multiply(s.R, dgates(), dh());
  }
  if (trace) stage->value(t, trial(), delta_after(t));
}

// Each classifier recodes the state it reads, and no other.
template <typename S>
void Forward<S>::recode_classified(int64_t t) {
  const at::Tensor delta_t = delta.tensor()[t];
  const auto state_of = [&](int64_t i, bool recoded) {  // [B,H]
    const int64_t l = classifiers->layer(i);
    if (classifiers->reads_c(i))
      return tensor_at(recoded ? c(l, slot(t)) : raw_c(l, t), {s.R, s.H}, accum.device());
    return tensor_at(recoded ? h(l, slot(t)) : raw_h(l, t), {s.R, s.H}, accum.device());
  };
  for (int64_t i = 0; i < classifiers->count(); ++i)
    classifiers->add(i, t, state_of(i, false), delta_t, true);
  open_gate(t);
  choose_steps(t, {});
  for (int64_t l = s.L - 1; l >= 0; --l) {
    Recode<S> p = recode_layer(l, t);
    p.h_after = nullptr;
    p.dc = no_gradient();
    for (int64_t i = 0; i < classifiers->count(); ++i)
      if (classifiers->layer(i) == l)
        (classifiers->reads_c(i) ? p.dc : p.dh) =
            classifiers->gradient(i).template const_data_ptr<A>();
    kernels.recode(launch, p);
  }
  if (!trace) return;
  for (int64_t i = 0; i < classifiers->count(); ++i)
    classifiers->add(i, t, state_of(i, true), delta_after.tensor()[t], false);
}

// The input's share of the gates of layer 0, for all steps at once.
template <typename S>
void Forward<S>::read_input() {
  from_below[0].multiply(s.T * s.R, s.input.const_data_ptr<S>(), projected(), bias_of(0));
}

template <typename S>
at::Tensor Forward<S>::raw_states(bool of_c) const {
  std::vector<at::Tensor> states;
  for (int64_t l = 0; l < s.L; ++l)
    states.push_back(
        tensor_at(of_c ? raw_c(l, s.T - 1) : raw_h(l, s.T - 1), {s.R, s.H}, accum.device()));
  return at::stack(states);
}

template <typename S>
ForwardResult Forward<S>::run() {
  read_input();
  for (int64_t t = 0; t < s.T; ++t) {
    cells(t);
    if (s.options.recodes()) recode(t);
  }
  Losses losses;
  if (s.options.loss_shares_gradient()) {
    losses.nll = losses.objective = shared.log_p.tensor().neg_();
  } else if (s.options.loss) {
    LossGradients gradients = decoder_grads;
    gradients.states = loss_grads.tensor();
    losses = sequence_loss<S>(s, output.tensor(), gradients);
  }
  check_launches(accum.device());
  return result(losses);
}

template <typename S>
ForwardResult Forward<S>::result(Losses losses) {
  const int64_t T = s.T, B = s.B, L = s.L, states = s.options.states(), K = s.R / s.B;
  const auto none = [&] { return at::empty({0}, accum); };
  const auto given = [&](const at::Tensor& t) { return t.defined() ? t : none(); };
  // What does not count has no signal: behind the end, or an ignored target.
  if (s.counted.defined()) {
    const at::Tensor uncounted = s.counted.logical_not();
    delta.tensor().masked_fill_(uncounted, 0);
    if (delta_after) delta_after.tensor().masked_fill_(uncounted, 0);
  }
  at::Tensor after = none(), step_size = none(), norms = none();
  at::Tensor recoded = at::empty({0}, accum.dtype(at::kByte));
  if (trace) {
    after = delta_after.tensor();
    // Samples of an instance: the norm of their gradients together, the mean of their steps.
    norms = K == 1 ? grad_norm.tensor()
                   : grad_norm.tensor().view({L, states, T, K, B}).square().sum(3).sqrt();
    recoded = at::ones({T, B}, recoded.options());
    if (live) recoded.mul_(s.live.narrow(1, 0, B));
    if (open)
      recoded.mul_(open.tensor().narrow(1, 0, B));
    else if (active)
      recoded.mul_(s.active.narrow(1, 0, B));
    if (s.options.step == StepKind::kPredicted)
      step_size = sizes.tensor().view({L, states, T, K, B}).mean(3);
    else if (s.options.step == StepKind::kBacktracking)
      step_size = sizes.tensor().narrow(3, 0, B).expand({L, states, T, B});
    else
      step_size = s.step.view({L, states, 1, 1}).expand({L, states, T, B});
    step_size = step_size * recoded;
  }
  std::vector<at::Tensor> kept;
  if (save)
    kept = Saved{gates.tensor(),
                 h.tensor(),
                 c.tensor(),
                 layer_inputs.tensor(),
                 step_grads.tensor(),
                 loss_grads.tensor(),
                 decoder_grads.weight,
                 decoder_grads.bias,
                 losses.member_log_p,
                 grad_h.tensor(),
                 alphas(),
                 shared.chosen.tensor()}
               .list();
  const auto handed_on = [&](const at::Tensor& states_of) {  // [L,R,H]
    return states_of.to(s.state_type, /*non_blocking=*/false, /*copy=*/true);
  };
  const bool two_losses = s.ensemble && s.options.loss;
  return {output.tensor().to(s.io_type),
          handed_on(final_h()),
          handed_on(final_c()),
          given(losses.nll),
          two_losses ? losses.objective : none(),
          delta.tensor(),
          after,
          step_size,
          norms,
          recoded,
          kept};
}

template <typename S>
at::Tensor Forward<S>::alphas() const {
  if (!s.options.exact || !s.options.recodes()) return {};
  const int64_t T = s.T, R = s.R, L = s.L, states = s.options.states();
  at::Tensor steps = sizes ? sizes.tensor() : s.step.view({L, states, 1, 1});
  steps = steps.expand({L, states, T, R});
  const auto where = [&](const at::Tensor& rows) {
    if (rows.defined()) steps = steps * rows;
  };
  where(open ? open.tensor() : s.active);
  where(s.live);
  return steps.contiguous();
}

template class Forward<float>;
template class Forward<double>;

std::vector<at::Tensor> Saved::list() const {
  std::vector<at::Tensor> list = {gates,
                                  h,
                                  c,
                                  layer_inputs,
                                  step_grads,
                                  loss_grads,
                                  decoder_weight_grad,
                                  decoder_bias_grad,
                                  member_log_p,
                                  grad_h,
                                  alpha,
                                  chosen};
  for (at::Tensor& t : list)
    if (!t.defined()) t = at::empty({0}, gates.options());
  return list;
}

Saved Saved::from_list(at::TensorList list) {
  TORCH_CHECK_VALUE(list.size() == 12, "saved must hold 12 tensors, got ", list.size());
  const auto present = [](const at::Tensor& t) { return t.numel() > 0 ? t : at::Tensor(); };
  return {list[0],          list[1],          list[2],           present(list[3]),
          present(list[4]), present(list[5]), present(list[6]),  present(list[7]),
          present(list[8]), present(list[9]), present(list[10]), present(list[11])};
}

ForwardResult recode_forward(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, at::TensorList weights,
    const OptionalTensor& decoder_weight, const OptionalTensor& decoder_bias,
    at::TensorList classifiers, const at::Tensor& step, at::TensorList step_network,
    const OptionalTensor& gate, const OptionalTensor& targets, const OptionalTensor& labels,
    const OptionalTensor& mask, const OptionalTensor& lengths, const OptionalTensor& seed,
    c10::string_view signal, bool argmax, int64_t samples, double sample_p, bool mean_logits,
    at::IntArrayRef classifier_states, bool recode_h, bool recode_c, double dropout,
    double output_dropout, c10::string_view step_kind, double shrink, int64_t trials, int64_t time,
    bool loss, bool exact, bool save, bool save_step_grads, bool save_decoder_grads, bool trace) {
  const c10::DeviceGuard guard(input.device());
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
  options.shrink = shrink;
  options.trials = trials;
  options.time = time;
  options.loss = loss;
  options.exact = exact;
  const Sequence s =
      make_sequence({input, h0, c0, weights, decoder_weight, decoder_bias, classifiers, step,
                     step_network, gate, targets, labels, mask, lengths, seed},
                    options);
  if (s.input.scalar_type() == at::kDouble)
    return Forward<double>(s, {save, save_step_grads, save_decoder_grads, trace}).run();
  return Forward<float>(s, {save, save_step_grads, save_decoder_grads, trace}).run();
}

}  // namespace fused_recoder
