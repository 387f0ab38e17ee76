// The states of all layers during a forward pass, and where each of them is kept: in the place
// where it is needed last, so that nothing is copied.
#pragma once

#include "../engine/context.h"
#include "../engine/problem.h"

namespace fused_recoder {

template <typename S>
class CellStates {
 public:
  using A = typename AccumulateIn<S>::type;
  // `save`: all time steps are kept for the backward pass; else this one and the last.
  CellStates(const Problem& problem, bool save);

  const S* h_before(int64_t l, int64_t t) const { return t > 0 ? h(l, slot(t - 1)) : h0(l); }
  const A* c_before(int64_t l, int64_t t) const { return t > 0 ? c(l, slot(t - 1)) : c0(l); }
  // Gates of layer 0 start as the projected inputs of all time steps.
  A* gates_of(int64_t l, int64_t t) const {
    return save ? gates(l, t) : l == 0 ? projected(t) : gates(l, 0);
  }
  // Unrecoded, [R,H].
  S* raw_h(int64_t l, int64_t t) const {
    if (!p.recodes_h()) return h(l, slot(t));
    if (l < p.L - 1) return drops_between_layers() ? h_raw(l) : layer_input(l, t);
    return output_is_raw ? output(t) : h_raw(l);
  }
  A* raw_c(int64_t l, int64_t t) const { return p.recodes_c() ? c_raw(l) : c(l, slot(t)); }
  // Recoded, [R,H].
  S* new_h(int64_t l, int64_t t) const { return h(l, slot(t)); }
  A* new_c(int64_t l, int64_t t) const { return c(l, slot(t)); }
  // What layer l hands up: null where it is raw_h itself.
  S* up(int64_t l, int64_t t) const {
    if (l < p.L - 1) return drops_between_layers() ? layer_input(l, t) : nullptr;
    if (p.output_is_recoded()) return decoder_input();
    return output_is_raw ? nullptr : output(t);
  }
  const S* above(int64_t l, int64_t t) const {
    const S* handed = up(l, t);
    return handed != nullptr ? handed : raw_h(l, t);
  }
  // What the signal reads: behind the output's dropout, or before it.
  const S* read_by_signal(int64_t t) const {
    return p.sees_output_dropout() ? above(p.L - 1, t) : raw_h(p.L - 1, t);
  }

  // The states behind time step t, [L,R,H].
  at::Tensor h_after(int64_t t) const { return h.tensor().select(1, slot(t)); }
  at::Tensor c_after(int64_t t) const { return c.tensor().select(1, slot(t)); }
  // ... before it was recoded.
  at::Tensor raw(int64_t t, bool of_c) const;
  at::Tensor as_tensor(const S* rows) const {  // [R,H]
    return tensor_at(const_cast<S*>(rows), {p.R, p.H}, p.device());
  }

  const Problem& p;
  const bool save;
  const bool output_is_raw;  // `output` is the unrecoded state itself

  Buffer<S> output;        // [T,R,H] what is predicted from
  Buffer<S> h0;            // [L,R,H]
  Buffer<A> c0;            // [L,R,H]
  Buffer<S> h;             // [L, T or 2, R, H] recoded
  Buffer<A> c;             // [L, T or 2, R, H] recoded
  Buffer<A> gates;         // [L, T or 1, R, G]
  Buffer<A> projected;     // [T,R,G] (saved: gates of layer 0)
  Buffer<S> layer_inputs;  // [L-1, T or 1, R, H]

 private:
  int64_t slot(int64_t t) const { return save ? t : t % 2; }
  S* layer_input(int64_t l, int64_t t) const { return layer_inputs(l, save ? t : 0); }
  bool drops_between_layers() const { return p.layer_p() > 0; }

  Buffer<S> h_raw;          // [L,R,H]
  Buffer<A> c_raw;          // [L,R,H]
  Buffer<S> decoder_input;  // [R,H]
};

}  // namespace fused_recoder
