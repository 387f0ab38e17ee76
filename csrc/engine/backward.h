// The sequence driver, backward: truncated BPTT written by hand.
#pragma once

#include <optional>

#include "context.h"
#include "exact.h"
#include "loss.h"
#include "ops.h"

namespace fused_recoder {

// What arrived from the loss; all may be absent.
struct Cotangents {
  OptionalTensor output;          // [T,R,H]
  OptionalTensor h_n, c_n;        // [L,R,H]
  OptionalTensor nll, objective;  // [T,B]
  bool of_loss() const { return nll.has_value() || objective.has_value(); }
};

struct Wanted {
  bool input, step, decoder;
};

template <typename S>
class Backward {
 public:
  using A = typename AccumulateIn<S>::type;
  // output [T,R,H]: only with a gradient of the loss.
  Backward(const Sequence& s, const Saved& saved, const Cotangents& bar,
           const OptionalTensor& output, const Wanted& wanted);
  BackwardResult run();

 private:
  void detached();
  void exact();
  // Through the cell of layer l at step t; dh_up [R,H] (null: zero) is the cotangent of what it
  // handed up.
  void cell(int64_t l, int64_t t, const A* dh_up);
  // The gradients of the layer's weights, from dgates of all steps.
  void weight_gradients(int64_t l);
  // The cotangent of the input of layer l, all steps.
  at::Tensor below(int64_t l) const;
  std::vector<at::Tensor> step_network_gradients() const;
  at::Tensor dgates_of(int64_t l) const {  // [T*R,4H]
    return dgates.tensor()[by_layer(l)].view({s.T * s.R, 4 * s.H});
  }
  ConstantMatrix<S> hidden_matrix(int64_t l) const {
    return ConstantMatrix<S>(s.layers[l].w_hh, false, s.T, s.R);
  }
  // With detached gradients one layer is finished before the next is begun.
  int64_t by_layer(int64_t l) const { return sweep.has_value() ? l : 0; }

  const Sequence& s;
  const Saved& saved;
  const Wanted wanted;
  const Kernels<S>& kernels;
  const Launch launch;
  const at::TensorOptions storage, accum;
  const Buffer<A> gates, c, c0, step_grads;
  const Buffer<uint8_t> live;
  std::optional<ExactSweep<S>> sweep;

  at::Tensor output_bar;  // [T,R,H] or undefined: zero
  LossGradients decoder;
  std::vector<ConstantMatrix<S>> to_hidden;  // [4H -> H] by layer, while it is needed
  std::vector<at::Tensor> recurrent_masks;   // [R,H] or undefined, by layer
  Buffer<S> dgates;                          // [L or 1,T,R,4H]
  Buffer<A> dh, dc;                          // [L,R,H] cotangents of the recoded states
  Buffer<A> carried;                         // [R,H]
  Buffer<A> step_bar;                        // [L,S,T,R] cotangents of the step sizes
  std::vector<std::vector<at::Tensor>> grad_weights;
  at::Tensor grad_input;
};

}  // namespace fused_recoder
