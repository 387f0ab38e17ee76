#include "stack.h"

namespace fused_recoder {

template <typename S>
CellStack<S>::CellStack(const CellStates<S>& states, int64_t calls)
    : p(states.p),
      states(states),
      kernels(kernels_for<S>(p.device())),
      launch(launch_on(p.device())),
      live(p.live) {
  for (int64_t l = 0; l < p.L; ++l) {
    const Layer& layer = p.layers[l];
    from_hidden.emplace_back(p.precision, layer.w_hh, true, calls, p.R);
    from_below.push_back(
        l > 0 ? ConstantMatrix<S>(p.precision, layer.w_ih, true, calls, p.R)
              : ConstantMatrix<S>(p.precision, layer.w_ih, true, calls / p.T, p.T * p.R));
  }
  if (p.signal.own_states && p.spec.sample_p > 0) h_masked = Buffer<S>({p.R, p.H}, p.storage());
}

template <typename S>
void CellStack<S>::read_input() const {
  from_below[0].multiply(p.T * p.R, p.input.const_data_ptr<S>(), states.projected(), bias_of(0));
}

template <typename S>
const S* CellStack<S>::recurrent(int64_t l, int64_t t) const {
  const S* before = states.h_before(l, t);
  if (!h_masked) return before;
  MaskRows<S> m{};
  m.samples = 1;
  m.rows = p.R;
  m.units = p.H;
  m.dropout = p.dropout_of(kRecurrentStream + l, p.spec.sample_p);
  m.in = before;
  m.out = h_masked();
  kernels.mask_rows(launch, m);
  return h_masked();
}

template <typename S>
void CellStack<S>::advance(int64_t t) const {
  for (int64_t l = 0; l < p.L; ++l) {
    A* gates = states.gates_of(l, t);
    if (l > 0) from_below[l].multiply(p.R, states.above(l - 1, t), gates, bias_of(l));
    from_hidden[l].multiply(p.R, recurrent(l, t), gates, nullptr, /*accumulate=*/true);

    CellForward<S> cell{};
    cell.rows = p.R;
    cell.hidden = p.H;
    cell.gates = gates;
    cell.c_prev = states.c_before(l, t);
    cell.h_prev = states.h_before(l, t);
    cell.live = live(t);
    cell.h = states.raw_h(l, t);
    cell.c = states.raw_c(l, t);
    cell.h_up = states.up(l, t);
    cell.dropout = p.dropout_above(l);
    cell.time = p.mask_time(t);
    kernels.cell_forward(launch, cell);
  }
}

template class CellStack<float>;
template class CellStack<double>;

}  // namespace fused_recoder
