// What a recoding step lowers. One class per family, with all that is known of it: the value at a
// time step, its gradient, what a step would make of it, and (gradient="exact") the backward pass
// of the gradient. An object serves one forward or one backward pass; which one, begin_*() tells
// it.
#pragma once

#include "../cell/saved.h"
#include "../cell/states.h"
#include "../engine/context.h"
#include "../engine/loss.h"
#include "../engine/problem.h"

namespace fused_recoder {

// What the gold signals share with the loss (saving 1 of the design): they write nll and its
// gradients as they go.
template <typename S>
struct SharedLoss {
  using A = typename AccumulateIn<S>::type;
  Buffer<A> log_p;          // [T,B] or absent: no loss is shared
  Buffer<A> loss_grads;     // [T,B,H] or absent: no gradient is wanted
  LossGradients gradients;  // of weight and bias, where they are wanted
  Buffer<int64_t> chosen;   // [T,B] or absent: the targets, kept for the exact backward pass
};

template <typename S>
class Signal {
 public:
  using A = typename AccumulateIn<S>::type;
  explicit Signal(const Problem& problem)
      : p(problem), kernels(kernels_for<S>(p.device())), launch(launch_on(p.device())) {}
  virtual ~Signal() = default;

  // ---- forward

  struct Forward {
    const CellStates<S>& states;
    const SharedLoss<S>& shared;
    bool tries;   // try_step() will be called
    bool traces;  // after() will be called
    bool values() const { return tries || traces; }
  };
  virtual void begin_forward(const Forward& pass) = 0;
  // delta [B] of time step t. Its gradient is kept until the next call.
  virtual void gradient(int64_t t, A* delta) = 0;
  // Whether the gradient enters at the top and goes down the layers, or at the states themselves.
  virtual bool descends() const { return true; }
  // Sets where in the cell of layer l the gradient enters: dh, dc, row_scale, dropout, h_after.
  virtual void enter(int64_t l, int64_t t, Recode<S>& cell) const = 0;
  // delta [B] that steps of length alpha [R] would give.
  virtual void try_step(int64_t t, const A* alpha, A* delta) = 0;
  // delta [B] of the recoded states of time step t.
  virtual void after(int64_t t, A* delta) = 0;

  // ---- backward, of the gradient

  struct Backward {
    const Saved& saved;
    LossGradients decoder;  // weight and bias are added to, where they are defined
    // [T,B] or undefined: the cotangent of a loss that shares its logits with the signal
    at::Tensor loss_bar;
  };
  virtual void begin_backward(const Backward& pass) = 0;
  // Where the gradient descends: given the top states [R,H] that the signal of time step t read and
  // the cotangent [R,H] of its gradient there, the cotangent [R,H] of the top states. Time steps
  // come in any order, each once.
  virtual void curvature(int64_t t, const S* top, const S* gradient_bar, A* top_bar);
  // Where it does not: given the cotangents dh, dc [L,R,H] of the recoded states, ...
  virtual void curvature_of_states(int64_t t, const Buffer<A>& dh, const Buffer<A>& dc);
  // ... what layer l gets of it.
  virtual void contribute(int64_t l, CellBackward<S>& cell) const;
  // After the last time step: what is left to add to the decoder's gradients.
  virtual void finish_backward() {}

 protected:
  static const A* bias_of(const LinearMap& map) {
    return map.bias.defined() ? map.bias.template const_data_ptr<A>() : nullptr;
  }
  at::Tensor rows_at(const S* rows) const {  // [R,H]
    return tensor_at(const_cast<S*>(rows), {p.R, p.H}, p.device());
  }

  const Problem& p;
  const Kernels<S>& kernels;
  const Launch launch;
};

}  // namespace fused_recoder
