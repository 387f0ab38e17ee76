// gradient="exact": the part of back-propagation that goes through the recoding gradient itself.
// Used by engine/backward.cpp, step by step. Derivation: docs/exact-gradients.md.
#pragma once

#include <memory>

#include "../signals/signal.h"
#include "saved.h"

namespace fused_recoder {

// Where the cotangents of step sizes are collected; absent where nobody wants them.
template <typename A>
struct StepBarBuffers {
  Buffer<A> by_row;   // [L,S,T,R]
  Buffer<A> by_unit;  // [L,S,R,H]

  StepBar<A> at(int64_t l, int64_t i, int64_t t) const { return {by_row(l, i, t), by_unit(l, i)}; }
};

template <typename S>
class RecodingBackward {
 public:
  using A = typename AccumulateIn<S>::type;
  explicit RecodingBackward(const Problem& problem, const typename Signal<S>::Backward& pass);

  // Given the cotangents of the recoded states after time step t, dh and dc [L,R,H], and of the
  // output of time step t (null: zero): upwards through the layers, and through the signal.
  // step_bar receives the cotangents of the step sizes.
  void run(int64_t t, const Buffer<A>& dh, const Buffer<A>& dc, const A* output_bar,
           const StepBarBuffers<A>& step_bar);
  // What the time step gives to the cell of layer l.
  void contribute(int64_t l, CellBackward<S>& cell) const;
  // What all time steps give to the weight W_ih of layer l.
  void add_to_input_weight(int64_t l, const at::Tensor& grad_w_ih) const;
  // Completes the decoder's gradients.
  void finish() { signal->finish_backward(); }
  // Whether step_bar is written here.
  bool gives_step_bar() const { return signal->descends(); }

 private:
  RecodeBackward<S> cell(int64_t l, int64_t t) const;

  const Problem& p;
  const Kernels<S>& kernels;
  const Launch launch;
  std::unique_ptr<Signal<S>> signal;
  const Buffer<A> gates, c, c0, grad_h, alpha, unit_sizes;
  std::vector<ConstantMatrix<S>> to_gates;  // W_ih of layers above the bottom, [H -> G]
  Buffer<A> dgates_bar;                     // [R,G]
  Buffer<S> below_bar;                      // [L-1,T,R,H] cotangent of what layer l+1 sent to l
  Buffer<S> dgates;                         // [L-1,T,R,G] what it sent
  Buffer<S> top_gradient_bar, top;          // [R,H]
  Buffer<A> top_bar;                        // [R,H]
  Buffer<A> gates_bar;                      // [L,R,G]
  Buffer<A> c_bar, c_prev_bar;              // [L,R,H]
};

}  // namespace fused_recoder
