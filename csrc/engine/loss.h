// The cross-entropy loss of decoded states and its gradients, without a [N,V] tensor. Used after
// the time loop, where the loss does not share its gradient with the recoder, and in the backward
// pass, where per-token weights ask for the decoder's gradient once more.
#pragma once

#include "context.h"
#include "problem.h"

namespace fused_recoder {

// Rows of logits held at a time: enough for efficient GEMMs, 24 MB at most where V allows it.
int64_t loss_chunk_rows(int64_t vocab, int64_t at_least, int64_t total);

// Where the gradients of a summed loss go; undefined tensors are not computed. In a Problem's
// gradients, weight and bias have a leading dimension of members for an ensemble.
struct LossGradients {
  at::Tensor states;    // [T,R,H]
  at::Tensor weight;    // [V,H] added to
  at::Tensor bias;      // [V] added to
  at::Tensor bias_sum;  // [V] scratch, for those who must not allocate; undefined: allocated

  bool any() const { return states.defined() || weight.defined() || bias.defined(); }
};

// Zeros in the shapes of the problem's decoder; no bias where it has none.
LossGradients zero_decoder_gradients(const Problem& problem);

// Adds what rows of d(nll)/d(logits) [n,V] and their states [n,H] give to weight and bias.
template <typename S>
void add_decoder_gradients(Precision precision, const LossGradients& gradients,
                           const at::Tensor& directions, const at::Tensor& states);

// What the model predicts with and what it is trained on differ for an ensemble.
struct Losses {
  at::Tensor nll;           // [T,B] of the (mean) prediction; 0 where ignored
  at::Tensor objective;     // [T,B] what the loss is the mean of; the same tensor, or the members'
  at::Tensor member_log_p;  // [K,T,B] an ensemble's log p of the target; else undefined
};

// Losses of states [T,R,H] and the gradients of the summed objective.
template <typename S>
Losses sequence_loss(const Problem& s, const at::Tensor& states, const LossGradients& gradients);

// Gradients once more, of sum(objective * objective_bar + nll * nll_bar), both [T,B] or undefined.
template <typename S>
void weighted_loss_gradients(const Problem& s, const at::Tensor& states,
                             const at::Tensor& member_log_p, const at::Tensor& objective_bar,
                             const at::Tensor& nll_bar, const LossGradients& gradients);

}  // namespace fused_recoder
