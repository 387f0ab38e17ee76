#include "recoding.h"

#include <ATen/ops/ones.h>

#include "lstm.h"

namespace fused_recoder {

template <typename S>
Recoding<S>::Recoding(const CellStates<S>& states, Signal<S>& signal, StepPolicy<S>& policy,
                      const Keep& keep, int64_t calls)
    : delta(at::zeros({states.p.T, states.p.B}, states.p.accum())),
      delta_after(keep.trace ? at::zeros({states.p.T, states.p.B}, states.p.accum())
                             : at::Tensor()),
      p(states.p),
      states(states),
      signal(signal),
      policy(policy),
      kernels(kernels_for<S>(p.device())),
      launch(launch_on(p.device())),
      live(p.live),
      active(p.active) {
  const int64_t T = p.T, R = p.R, H = p.H, L = p.L, states_recoded = p.spec.states();
  for (int64_t l = 0; l < L; ++l)
    to_below.push_back(l > 0 && signal.descends()
                           ? ConstantMatrix<S>(p.precision, p.layers[l].w_ih, false, calls, R)
                           : ConstantMatrix<S>());
  dh = Buffer<A>({R, H}, p.accum());
  if (L > 1) dgates = Buffer<S>({R, kGates * H}, p.storage());
  if (p.gate.defined()) open = Buffer<uint8_t>({T, R}, p.accum().dtype(at::kByte));
  if (keep.grad_h) grad_h = Buffer<A>({L, T, R, H}, p.accum());
  if (keep.step_grads) step_grads = Buffer<A>({L, states_recoded, T, R, H}, p.accum());
  if (keep.trace) grad_norm = Buffer<A>({L, states_recoded, T, R}, p.accum());
}

template <typename S>
void Recoding<S>::run(int64_t t) {
  signal.gradient(t, delta(t));
  open_gate(t);
  policy.choose(t, states, signal, delta(t));
  for (int64_t l = p.L - 1; l >= 0; --l) {
    Recode<S> k = cell(l, t);
    if (l == p.L - 1 || !signal.descends()) {
      signal.enter(l, t, k);
    } else {
      k.dh = dh();
      k.dropout = p.dropout_above(l);
    }
    const bool goes_on = l > 0 && signal.descends();
    k.dgates = goes_on ? dgates() : nullptr;
    kernels.recode(launch, k);
    if (goes_on) to_below[l].multiply(p.R, dgates(), dh());
  }
  if (delta_after) signal.after(t, delta_after(t));
}

template <typename S>
void Recoding<S>::open_gate(int64_t t) {
  if (!open) return;
  kernels.gate(launch, Gate<A>{p.samples_per_instance(), p.B, delta(t), p.gate.const_data_ptr<A>(),
                               active(t), open(t)});
}

// The parts of a layer's step that do not depend on where the gradient comes from.
template <typename S>
Recode<S> Recoding<S>::cell(int64_t l, int64_t t) const {
  Recode<S> k{};
  k.rows = p.R;
  k.hidden = p.H;
  k.gates = states.gates_of(l, t);
  k.c_prev = states.c_before(l, t);
  k.c = states.raw_c(l, t);
  k.h = states.raw_h(l, t);
  k.time = p.mask_time(t);
  k.active = open ? open(t) : active(t);
  k.live = live(t);
  k.h_recoded = states.new_h(l, t);
  k.c_recoded = states.new_c(l, t);
  if (l == p.L - 1 && p.output_is_recoded()) {
    k.h_up = states.output(t);
    k.up_dropout = p.dropout_above(l);
  }
  if (p.spec.recode_h) {
    k.alpha_h = policy.size(l, 0, t);
    k.grad_h = step_grads(l, 0, t);
    k.norm_h = grad_norm(l, 0, t);
  }
  if (p.spec.recode_c) {
    const int64_t i = p.index_of(true);
    k.alpha_c = policy.size(l, i, t);
    k.grad_c = step_grads(l, i, t);
    k.norm_c = grad_norm(l, i, t);
  }
  if (grad_h) k.grad_h = grad_h(l, t);
  return k;
}

template <typename S>
at::Tensor Recoding<S>::recoded() const {
  const at::Tensor recoded = at::ones({p.T, p.B}, p.accum().dtype(at::kByte));
  if (live) recoded.mul_(p.live.narrow(1, 0, p.B));
  if (rows_open().defined()) recoded.mul_(rows_open().narrow(1, 0, p.B));
  return recoded;
}

// Samples of an instance: the norm of their gradients together.
template <typename S>
at::Tensor Recoding<S>::norms() const {
  const int64_t K = p.samples_per_instance();
  if (K == 1) return grad_norm.tensor();
  return grad_norm.tensor().view({p.L, p.spec.states(), p.T, K, p.B}).square().sum(3).sqrt();
}

template <typename S>
at::Tensor Recoding<S>::steps_taken() const {
  at::Tensor steps = policy.sizes().expand({p.L, p.spec.states(), p.T, p.R});
  if (rows_open().defined()) steps = steps * rows_open();
  if (p.live.defined()) steps = steps * p.live;
  return steps.contiguous();
}

template class Recoding<float>;
template class Recoding<double>;

}  // namespace fused_recoder
