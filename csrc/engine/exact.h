// gradient="exact": the part of back-propagation that goes through the recoding gradient itself.
// Used by backward.cpp, step by step. Derivation: docs/exact-gradients.md.
#pragma once

#include <memory>

#include "context.h"
#include "curvature.h"
#include "ops.h"
#include "sequence.h"

namespace fused_recoder {

template <typename S>
class ExactSweep {
 public:
  using A = typename AccumulateIn<S>::type;
  // decoder: gradients to add to. loss_bar: as for make_curvature().
  ExactSweep(const Sequence& s, const Saved& saved, const LossGradients& decoder,
             const at::Tensor& loss_bar);

  // Given the cotangents of the recoded states after step t, dh and dc [L,R,H], and of the output
  // of step t (null: zero): upwards through the layers, and through the signal. step_bar
  // [L,S,T,R] (may be absent) receives the cotangents of the step sizes.
  void step(int64_t t, const Buffer<A>& dh, const Buffer<A>& dc, const A* output_bar,
            const Buffer<A>& step_bar);
  // What the step gives to the cell of layer l.
  void contribute(int64_t l, CellBackward<S>& p) const;
  // What all steps give to the weight W_ih of layer l.
  void add_to_input_weight(int64_t l, const at::Tensor& grad_w_ih) const;
  // Completes the decoder's gradients.
  void finish() {
    if (curvature) curvature->finish();
  }

 private:
  void classified(int64_t t, const Buffer<A>& dh, const Buffer<A>& dc);

  const Sequence& s;
  const Kernels<S>& kernels;
  const Launch launch;
  const Buffer<A> gates, c, c0, grad_h, alpha;
  std::unique_ptr<SignalCurvature<S>> curvature;
  std::vector<ConstantMatrix<S>> to_gates;  // W_ih of layers above the bottom, [H -> 4H]
  Buffer<A> dgates_bar;                     // [R,4H]
  Buffer<S> below_bar;                      // [L-1,T,R,H] cotangent of what layer l+1 sent to l
  Buffer<S> dgates;                         // [L-1,T,R,4H] what it sent
  Buffer<S> top_gradient_bar, top;          // [R,H]
  Buffer<A> top_bar;                        // [R,H]
  Buffer<A> gates_bar;                      // [L,R,4H]
  Buffer<A> c_bar, c_prev_bar;              // [L,R,H]
  std::vector<at::Tensor> h_bar;            // [R,H] of layers that a classifier reads; undefined
};

}  // namespace fused_recoder
