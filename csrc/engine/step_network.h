// Predicted step sizes: softplus(MLP(state)), one network per (layer, state), ReLU in between. The
// state is a constant for it, so its backward pass is one batched call after BPTT.
#pragma once

#include "context.h"
#include "sequence.h"

namespace fused_recoder {

template <typename S>
class StepNetwork {
 public:
  using A = typename AccumulateIn<S>::type;
  // Will be called `calls` times with `rows` rows.
  StepNetwork(const std::vector<LinearMap>& maps, int64_t calls, int64_t rows);

  // states [rows,H] -> what the softplus of is the sizes [rows]
  void predict(const S* states, A* before_softplus) const;

 private:
  int64_t rows_;
  std::vector<LinearMap> maps_;
  std::vector<ConstantMatrix<S>> matrices_;
  std::vector<at::Tensor> hidden_;  // [rows, out of each map but the last]
};

// Gradients of weights and biases (in the order of step_network), given the states [N,H] and the
// cotangents [N] of the step sizes.
std::vector<at::Tensor> step_network_backward(const std::vector<LinearMap>& maps,
                                              const at::Tensor& states, const at::Tensor& bar);

}  // namespace fused_recoder
