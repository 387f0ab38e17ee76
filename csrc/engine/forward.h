// The sequence driver, forward: for each time step the layers, the signal, the recoding step; then
// the loss. Knows no device, no signal and no step: kernels come from the table, GEMMs from
// ConstantMatrix (context.h).
#pragma once

#include <memory>
#include <tuple>

#include "../cell/recoding.h"
#include "../cell/saved.h"
#include "../cell/stack.h"
#include "context.h"
#include "loss.h"

namespace fused_recoder {

// output [T,R,H], h_n [L,R,H], c_n [L,R,H], nll [T,B], objective [T,B] (of an ensemble, whose loss
// is not the nll of its prediction), delta [T,B], delta_after [T,B], step_size [L,S,T,B],
// grad_norm [L,S,T,B], recoded [T,B] uint8, saved. `nll` has no elements without a loss, the trace
// (delta_after, step_size, grad_norm, recoded) none unless asked for; `saved` is empty unless asked
// for.
using ForwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
               at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>>;

template <typename S>
class Forward {
 public:
  using A = typename AccumulateIn<S>::type;
  explicit Forward(const Problem& problem);
  ForwardResult run();

 private:
  void make_loss_buffers();
  void make_recoder();
  Losses losses();
  void forget_uncounted() const;
  Saved saved(const Losses& losses) const;

  const Problem& p;
  const bool trace;
  CellStates<S> states;
  CellStack<S> stack;
  std::unique_ptr<Signal<S>> signal;
  std::unique_ptr<StepPolicy<S>> policy;
  std::unique_ptr<Recoding<S>> recoding;
  SharedLoss<S> shared;
  Buffer<A> loss_grads;  // [T,R,H]
  LossGradients decoder_grads;
};

}  // namespace fused_recoder
