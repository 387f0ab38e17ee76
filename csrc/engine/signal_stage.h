// A signal inside the time loop: its value at step t and its gradient in the top state. One class
// per way of decoding; forward.cpp picks one and knows no more of it.
#pragma once

#include <memory>

#include "context.h"
#include "loss.h"
#include "sequence.h"

namespace fused_recoder {

template <typename S>
class SignalStage {
 public:
  using A = typename AccumulateIn<S>::type;
  virtual ~SignalStage() = default;

  // The gradient in `top` [R,H] is row_scale [R] (null: 1) times dh [R,H].
  struct Gradient {
    const A* dh;
    const A* row_scale;
  };
  // delta [B] of the top states of step t, and its gradient.
  virtual Gradient gradient(int64_t t, const S* top, A* delta) = 0;
  // delta [B] of other top states [R,H], with the targets and masks of step t.
  virtual void value(int64_t t, const S* top, A* delta) = 0;
};

// What the gold signals share with the loss (saving 1 of the design): they write nll and its
// gradients as they go.
template <typename S>
struct SharedLoss {
  using A = typename AccumulateIn<S>::type;
  Buffer<A> log_p;          // [T,B] or absent: no loss is shared
  Buffer<A> loss_grads;     // [T,B,H] or absent: no gradient is wanted
  Buffer<S> output;         // [T,B,H] what was decoded
  LossGradients gradients;  // of weight and bias, where they are wanted
  Buffer<int64_t> chosen;   // [T,B] or absent: the targets, kept for the exact backward pass
};

// nll, surprisal, entropy, ensembles with mean logits: one decoder. `values` says that value() will
// be called.
template <typename S>
std::unique_ptr<SignalStage<S>> make_decoder_stage(const Sequence& s, const SharedLoss<S>& shared,
                                                   bool values);

// MC Dropout, other ensembles, variational RNNs: the mean of K predictions.
template <typename S>
std::unique_ptr<SignalStage<S>> make_mixture_stage(const Sequence& s);

}  // namespace fused_recoder
