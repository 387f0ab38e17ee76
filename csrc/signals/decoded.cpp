#include "decoded.h"

namespace fused_recoder {

template <typename S>
void Signal<S>::curvature(int64_t, const S*, const S*, A*) {
  TORCH_INTERNAL_ASSERT(false, "this signal's gradient does not descend");
}

template <typename S>
void Signal<S>::curvature_of_states(int64_t, const Buffer<A>&, const Buffer<A>&) {
  TORCH_INTERNAL_ASSERT(false, "this signal's gradient descends");
}

template <typename S>
void Signal<S>::contribute(int64_t, CellBackward<S>&) const {
  TORCH_INTERNAL_ASSERT(false, "this signal's gradient descends");
}

template <typename S>
void DecodedSignal<S>::begin_forward(const Forward& pass) {
  states = &pass.states;
  traces = pass.traces;
  if (pass.values()) trial = Buffer<S>({p.R, p.H}, p.storage());
}

template <typename S>
void DecodedSignal<S>::gradient(int64_t t, A* delta) {
  top = top_gradient(t, states->read_by_signal(t), delta);
}

template <typename S>
void DecodedSignal<S>::enter(int64_t l, int64_t, Recode<S>& cell) const {
  TORCH_INTERNAL_ASSERT(l == p.L - 1);
  cell.dh = top.dh;
  cell.row_scale = top.row_scale;
  cell.dropout = p.signal_dropout();
  cell.h_after = traces ? trial() : nullptr;
}

template <typename S>
void DecodedSignal<S>::try_step(int64_t t, const A* alpha, A* delta) {
  TrialStep<S> step{};
  step.rows = p.R;
  step.hidden = p.H;
  step.gates = states->gates_of(p.L - 1, t);
  step.c = states->raw_c(p.L - 1, t);
  step.h = states->raw_h(p.L - 1, t);
  step.dh = top.dh;
  step.row_scale = top.row_scale;
  step.dropout = p.signal_dropout();
  step.time = p.mask_time(t);
  step.recodes_h = p.spec.recode_h;
  step.alpha = alpha;
  step.trial = trial();
  this->kernels.trial_step(this->launch, step);
  value(t, trial(), delta);
}

template class Signal<float>;
template class Signal<double>;
template class DecodedSignal<float>;
template class DecodedSignal<double>;

}  // namespace fused_recoder
