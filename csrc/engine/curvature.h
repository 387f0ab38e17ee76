// Second derivatives of the signal, for gradient="exact": the backward pass of the gradients that a
// SignalStage took in the top states. One class per way of decoding, as there.
#pragma once

#include <memory>

#include "context.h"
#include "loss.h"
#include "ops.h"
#include "sequence.h"

namespace fused_recoder {

template <typename S>
class SignalCurvature {
 public:
  using A = typename AccumulateIn<S>::type;
  virtual ~SignalCurvature() = default;

  // Given the top states [R,H] that the signal of step t read and the cotangent [R,H] of its
  // gradient there: the cotangent [R,H] of the top states. Steps come in any order, each once.
  virtual void backward(int64_t t, const S* top, const S* gradient_bar, A* top_bar) = 0;
  // After the last step: what is left to add to the decoder's gradients.
  virtual void finish() {}
};

// `gradients.weight` and `.bias` are added to, where they are defined. `chosen` [T,B]: the targets
// of a gold signal. `loss_bar` [T,B], undefined: zero: the cotangent of the loss where a gold
// signal shares its logits; the loss's gradients are then among the results.
template <typename S>
std::unique_ptr<SignalCurvature<S>> make_curvature(const Sequence& s,
                                                   const LossGradients& gradients,
                                                   const at::Tensor& chosen,
                                                   const at::Tensor& loss_bar);

}  // namespace fused_recoder
