#include "forward.h"

namespace fused_recoder {

template <typename S>
Forward<S>::Forward(const Problem& problem)
    : p(problem), trace(p.spec.trace && p.recodes()), states(p, p.spec.save), stack(states, p.T) {
  if (p.spec.loss && p.spec.save && !p.loss_waits_for_backward()) make_loss_buffers();
  if (p.recodes()) make_recoder();
}

template <typename S>
void Forward<S>::make_loss_buffers() {
  loss_grads = Buffer<A>({p.T, p.R, p.H}, p.accum());
  if (!p.spec.decoder_grad) return;
  decoder_grads = zero_decoder_gradients(p);
  if (decoder_grads.bias.defined()) decoder_grads.bias_sum = at::empty({p.V}, p.accum());
}

template <typename S>
void Forward<S>::make_recoder() {
  const bool differentiates = p.spec.save && p.differentiates_gradient();
  if (differentiates && p.signal.reads_target)
    shared.chosen = Buffer<int64_t>({p.T, p.B}, p.accum().dtype(at::kLong));
  if (p.loss_shares_gradient()) {
    shared.log_p = Buffer<A>({p.T, p.B}, p.accum());
    shared.loss_grads = loss_grads;
    shared.gradients = decoder_grads;
  }
  signal = make_signal<S>(p);
  policy = make_step_policy<S>(p, p.T);
  signal->begin_forward({states, shared, policy->tries(), trace});
  const bool step_grads = p.spec.save && p.spec.step_grad && !differentiates;
  recoding = std::make_unique<Recoding<S>>(
      states, *signal, *policy,
      typename Recoding<S>::Keep{step_grads, /*grad_h=*/differentiates, trace}, p.T);
}

template <typename S>
ForwardResult Forward<S>::run() {
  stack.read_input();
  for (int64_t t = 0; t < p.T; ++t) {
    stack.advance(t);
    if (recoding) recoding->run(t);
  }
  const Losses of_targets = losses();
  check_launches(p.device());

  const auto none = [&] { return at::empty({0}, p.accum()); };
  const auto given = [&](const at::Tensor& t) { return t.defined() ? t : none(); };
  at::Tensor delta = recoding ? recoding->delta.tensor() : at::zeros({p.T, p.B}, p.accum());
  at::Tensor after = none(), step_size = none(), norms = none();
  at::Tensor recoded = at::empty({0}, p.accum().dtype(at::kByte));
  forget_uncounted();
  if (trace) {
    after = recoding->delta_after.tensor();
    norms = recoding->norms();
    recoded = recoding->recoded();
    step_size = policy->sizes_by_instance() * recoded;
  }
  const auto handed_on = [&](const at::Tensor& states_of) {  // [L,R,H]
    return states_of.to(p.state_type, /*non_blocking=*/false, /*copy=*/true);
  };
  const bool two_losses = p.ensemble && p.spec.loss;
  return {states.output.tensor().to(p.io_type),
          handed_on(states.h_after(p.T - 1)),
          handed_on(states.c_after(p.T - 1)),
          given(of_targets.nll),
          two_losses ? of_targets.objective : none(),
          delta,
          after,
          step_size,
          norms,
          recoded,
          p.spec.save ? saved(of_targets).list() : std::vector<at::Tensor>()};
}

template <typename S>
Losses Forward<S>::losses() {
  if (p.loss_shares_gradient()) {
    const at::Tensor nll = shared.log_p.tensor().neg_();
    return {nll, nll, {}};
  }
  if (!p.spec.loss) return {};
  LossGradients gradients = decoder_grads;
  gradients.states = loss_grads.tensor();
  return sequence_loss<S>(p, states.output.tensor(), gradients);
}

// What does not count has no signal: behind the end, or an ignored target.
template <typename S>
void Forward<S>::forget_uncounted() const {
  if (!recoding || !p.counted.defined()) return;
  const at::Tensor uncounted = p.counted.logical_not();
  recoding->delta.tensor().masked_fill_(uncounted, 0);
  if (recoding->delta_after) recoding->delta_after.tensor().masked_fill_(uncounted, 0);
}

template <typename S>
Saved Forward<S>::saved(const Losses& losses) const {
  Saved saved;
  saved.gates = states.gates.tensor();
  saved.h = states.h.tensor();
  saved.c = states.c.tensor();
  saved.layer_inputs = states.layer_inputs.tensor();
  saved.loss_grads = loss_grads.tensor();
  saved.decoder_weight_grad = decoder_grads.weight;
  saved.decoder_bias_grad = decoder_grads.bias;
  saved.member_log_p = losses.member_log_p;
  saved.chosen = shared.chosen.tensor();
  if (!recoding) return saved;
  saved.step_grads = recoding->step_grads.tensor();
  saved.grad_h = recoding->grad_h.tensor();
  if (p.spec.exact) saved.alpha = recoding->steps_taken();
  return saved;
}

template class Forward<float>;
template class Forward<double>;

}  // namespace fused_recoder
