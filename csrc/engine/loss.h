// The cross-entropy loss of decoded states and its gradients, without a [N,V] tensor. Used after
// the time loop, where the loss does not share its gradient with the recoder, and in the backward
// pass, where per-token weights ask for the decoder's gradient once more.
#pragma once

#include "context.h"
#include "sequence.h"

namespace fused_recoder {

// Rows of logits held at a time: enough for efficient GEMMs, 24 MB at most where V allows it.
int64_t loss_chunk_rows(int64_t vocab, int64_t at_least, int64_t total);

// Where the gradients of the summed nll go; undefined tensors are not computed.
struct LossGradients {
  at::Tensor states;  // [N,H]
  at::Tensor weight;  // [V,H] added to
  at::Tensor bias;    // [V] added to
};

// Adds what rows of d(nll)/d(logits) [n,V] and their states [n,H] give to weight and bias.
template <typename S>
void add_decoder_gradients(const LossGradients& gradients, const at::Tensor& directions,
                           const at::Tensor& states);

// nll [N] of states [N,H] and targets [N] (negative: ignored, 0), and the gradients of its sum,
// each row weighted with weights [N] if these are defined.
template <typename S>
void decoder_loss(const Sequence& s, const at::Tensor& states, const at::Tensor& targets,
                  const at::Tensor& weights, const at::Tensor& nll, const LossGradients& gradients);

}  // namespace fused_recoder
