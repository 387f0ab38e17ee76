// The layers of the LSTM, forward: one time step of all of them.
#pragma once

#include "../engine/context.h"
#include "states.h"

namespace fused_recoder {

template <typename S>
class CellStack {
 public:
  using A = typename AccumulateIn<S>::type;
  // Matrices are packed for `calls` time steps.
  CellStack(const CellStates<S>& states, int64_t calls);

  // The input's share of the gates of layer 0, for all time steps at once.
  void read_input() const;
  // All layers of time step t, up to their unrecoded states.
  void advance(int64_t t) const;

 private:
  // What W_hh of layer l reads: the state, under its held mask where there is one.
  const S* recurrent(int64_t l, int64_t t) const;
  const A* bias_of(int64_t l) const {  // [G] or null
    return p.layers[l].bias.defined() ? p.layers[l].bias.const_data_ptr<A>() : nullptr;
  }

  const Problem& p;
  const CellStates<S>& states;
  const Kernels<S>& kernels;
  const Launch launch;
  std::vector<ConstantMatrix<S>> from_below;   // [I or H -> G] by layer
  std::vector<ConstantMatrix<S>> from_hidden;  // [H -> G]
  Buffer<S> h_masked;                          // [R,H] under a held recurrent mask
  Buffer<uint8_t> live;                        // [T,R]
};

}  // namespace fused_recoder
