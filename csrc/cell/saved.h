// What the forward pass keeps for the backward pass: every tensor is named, shaped and conditioned
// here, once. The fake kernel asks saved_layout() and only fills dimensions in.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "../engine/problem.h"

namespace fused_recoder {

// Undefined: not kept.
struct Saved {
  at::Tensor gates;         // [L,T,R,G] activated i, f, g, o
  at::Tensor h, c;          // [L,T,R,H] recoded states
  at::Tensor layer_inputs;  // [L-1,T,R,H] what went up between layers; not kept: `h` itself
  at::Tensor step_grads;    // [L,S,T,R,H] recoding gradients, for the gradient of the step sizes
  at::Tensor loss_grads;    // [T,R,H] d(objective)/d(output)
  // Gradients of the summed objective in the decoder.
  at::Tensor decoder_weight_grad;  // [V,H] or [K,V,H]
  at::Tensor decoder_bias_grad;    // [V] or [K,V]
  at::Tensor member_log_p;         // [K,T,B] of an ensemble's members
  // With gradient="exact"; where it differentiates the recoding gradient, loss_grads and the
  // decoder's gradients of a gold signal are left to the backward pass.
  at::Tensor grad_h;  // [L,T,R,H] d(delta)/d(h)
  at::Tensor alpha;   // [L,S,T,R] steps taken, 0 where a row was not recoded
  at::Tensor chosen;  // [T,B] int64 the targets of a gold signal

  // What is kept, in the order of the table.
  std::vector<at::Tensor> list() const;
  // Back again; raises ValueError where a tensor is not what the forward pass keeps for `problem`.
  static Saved from_list(at::TensorList list, const Problem& problem);
};

struct SavedTensor {
  std::string name;
  std::string shape;  // symbols as in problem.h, "L T R G"; or the argument it is shaped like
  bool is_index;      // int64, else of the accumulation type
};

// What is kept for a spec. The three facts are those that its tensors tell.
std::vector<SavedTensor> saved_layout(const Spec& spec, bool upper_layers, bool ensemble,
                                      bool decoder_bias);

}  // namespace fused_recoder
