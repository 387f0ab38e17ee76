// The sequence driver, backward: truncated BPTT written by hand.
#pragma once

#include <optional>
#include <tuple>

#include "../cell/lstm.h"
#include "../cell/recoding_backward.h"
#include "loss.h"

namespace fused_recoder {

// What arrived from the loss; all may be absent.
struct Cotangents {
  OptionalTensor output;          // [T,R,H]
  OptionalTensor h_n, c_n;        // [L,R,H]
  OptionalTensor nll, objective;  // [T,B]
  bool of_loss() const { return nll.has_value() || objective.has_value(); }
};

// grad_input [T,B,I] (empty unless asked for), grad_h0, grad_c0 [L,R,H], grad_weights like weights,
// grad_decoder_weight [V,H], grad_decoder_bias [V] (empty unless asked for), grad_step like the
// tensors of the step (none unless asked for). The recoding gradient is a constant unless `exact`.
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>,
                                  at::Tensor, at::Tensor, std::vector<at::Tensor>>;

template <typename S>
class Backward {
 public:
  using A = typename AccumulateIn<S>::type;
  // output [T,R,H]: only with a gradient of the loss.
  Backward(const Problem& problem, const Saved& saved, const Cotangents& bar,
           const OptionalTensor& output);
  BackwardResult run();

 private:
  // What the gradients of the losses give to the output and to the decoder; returns what is left to
  // the signal, [T,B] or undefined.
  at::Tensor start_from_losses(const Cotangents& bar, const OptionalTensor& output);
  void detached();
  void exact();
  // Through the cell of layer l at step t; dh_up [R,H] (null: zero) is the cotangent of what it
  // handed up.
  void cell(int64_t l, int64_t t, const A* dh_up);
  // dh of layer l becomes the cotangent of the state before.
  void to_state_before(int64_t l, const S* dgates_t);
  // The gradients of the layer's weights, from dgates of all steps.
  void weight_gradients(int64_t l);
  // The cotangent of the input of layer l, all steps.
  at::Tensor below(int64_t l) const;
  std::vector<at::Tensor> step_gradients() const;
  at::Tensor dgates_of(int64_t l) const {  // [T*R,G]
    return dgates.tensor()[by_layer(l)].view({p.T * p.R, kGates * p.H});
  }
  ConstantMatrix<S> hidden_matrix(int64_t l) const {
    return ConstantMatrix<S>(p.precision, p.layers[l].w_hh, false, p.T, p.R);
  }
  // With detached gradients one layer is finished before the next is begun.
  int64_t by_layer(int64_t l) const { return through_gradient.has_value() ? l : 0; }

  const Problem& p;
  const Saved& saved;
  const Kernels<S>& kernels;
  const Launch launch;
  const Buffer<A> gates, c, c0, step_grads;
  const Buffer<uint8_t> live;
  std::optional<RecodingBackward<S>> through_gradient;

  at::Tensor output_bar;  // [T,R,H] or undefined: zero
  LossGradients decoder;
  std::vector<ConstantMatrix<S>> to_hidden;  // [G -> H] by layer, while it is needed
  std::vector<at::Tensor> recurrent_masks;   // [R,H] or undefined, by layer
  Buffer<S> dgates;                          // [L or 1,T,R,G]
  Buffer<A> dh, dc;                          // [L,R,H] cotangents of the recoded states
  Buffer<A> carried;                         // [R,H]
  StepBarBuffers<A> step_bar;                // cotangents of the step sizes
  std::vector<std::vector<at::Tensor>> grad_weights;
  at::Tensor grad_input;
};

}  // namespace fused_recoder
