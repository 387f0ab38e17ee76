// The ops of torch.ops.fused_recoder, as bindings.cpp registers them. Shapes: see sequence.h.
#pragma once

#include <tuple>
#include <vector>

#include "sequence.h"

namespace fused_recoder {

// What a call of forward keeps for backward, in this order. An empty tensor stands for "absent".
struct Saved {
  at::Tensor gates;         // [L,T,R,4H] activated i, f, g, o
  at::Tensor h, c;          // [L,T,R,H] recoded states
  at::Tensor layer_inputs;  // [L-1,T,R,H] what went up between layers; absent: `h` itself
  at::Tensor step_grads;    // [L,S,T,R,H] recoding gradients; absent: step needs no gradient
  at::Tensor loss_grads;    // [T,R,H] d(objective)/d(output); absent: no loss
  // Gradients of the summed objective in the decoder; absent unless asked for.
  at::Tensor decoder_weight_grad;  // [V,H] or [K,V,H]
  at::Tensor decoder_bias_grad;    // [V] or [K,V]
  at::Tensor member_log_p;         // [K,T,B] of an ensemble's members
  // With gradient="exact"; where it differentiates the recoding gradient, loss_grads and the
  // decoder's gradients of a gold signal are left to the backward pass.
  at::Tensor grad_h;  // [L,T,R,H] d(delta)/d(h); absent for classifiers
  at::Tensor alpha;   // [L,S,T,R] steps taken, 0 where a row was not recoded
  at::Tensor chosen;  // [T,B] int64 the targets of a gold signal

  std::vector<at::Tensor> list() const;
  static Saved from_list(at::TensorList list);
};

// output [T,R,H], h_n [L,R,H], c_n [L,R,H], nll [T,B], objective [T,B] (of an ensemble, whose loss
// is not the nll of its prediction), delta [T,B], delta_after [T,B], step_size [L,S,T,B],
// grad_norm [L,S,T,B], recoded [T,B] uint8, saved. `nll` has no elements without a loss, the trace
// (delta_after, step_size, grad_norm, recoded) none unless asked for; `saved` is empty unless asked
// for.
using ForwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
               at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>>;

ForwardResult recode_forward(
    const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0, at::TensorList weights,
    const OptionalTensor& decoder_weight, const OptionalTensor& decoder_bias,
    at::TensorList classifiers, const at::Tensor& step, at::TensorList step_network,
    const OptionalTensor& gate, const OptionalTensor& targets, const OptionalTensor& labels,
    const OptionalTensor& mask, const OptionalTensor& lengths, const OptionalTensor& seed,
    c10::string_view signal, bool argmax, int64_t samples, double sample_p, bool mean_logits,
    at::IntArrayRef classifier_states, bool recode_h, bool recode_c, double dropout,
    double output_dropout, c10::string_view step_kind, double shrink, int64_t trials, int64_t time,
    bool loss, bool exact, bool save, bool save_step_grads, bool save_decoder_grads, bool trace);

// grad_input [T,B,I] (empty unless asked for), grad_h0, grad_c0 [L,R,H], grad_weights like
// weights, grad_decoder_weight [V,H], grad_decoder_bias [V] (empty unless decoder gradients were
// saved or, with `exact`, are asked for), grad_step [L,S] (empty unless the step needs it),
// grad_step_network like step_network (empty unless it predicted). The recoding gradient is a
// constant unless `exact`.
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>,
                                  at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>>;

// `output`, the decoder and `targets` are looked at only where a gradient arrives at a loss.
BackwardResult recode_backward(
    const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
    const OptionalTensor& grad_c_n, const OptionalTensor& grad_nll,
    const OptionalTensor& grad_objective, at::TensorList saved, const at::Tensor& input,
    const at::Tensor& h0, const at::Tensor& c0, at::TensorList weights,
    const OptionalTensor& decoder_weight, const OptionalTensor& decoder_bias,
    at::TensorList classifiers, const at::Tensor& step, at::TensorList step_network,
    const OptionalTensor& targets, const OptionalTensor& labels, const OptionalTensor& lengths,
    const OptionalTensor& seed, const OptionalTensor& output, c10::string_view signal, bool argmax,
    int64_t samples, double sample_p, bool mean_logits, at::IntArrayRef classifier_states,
    bool recode_h, bool recode_c, double dropout, double output_dropout, c10::string_view step_kind,
    int64_t time, bool exact, bool need_input_grad, bool need_step_grad, bool need_decoder_grad);

// hidden [N,H], weight [V,H], bias [V], targets [N] -> delta [N], d(delta)/d(hidden) [N,H]
std::tuple<at::Tensor, at::Tensor> signal_gradient(const at::Tensor& hidden,
                                                   const at::Tensor& weight,
                                                   const OptionalTensor& bias,
                                                   const OptionalTensor& targets,
                                                   c10::string_view signal);

// Cotangents of hidden [N,H], weight [V,H] and bias [V], given those of delta [N] and grad [N,H].
std::tuple<at::Tensor, at::Tensor, at::Tensor> signal_gradient_backward(
    const at::Tensor& delta_bar, const at::Tensor& grad_bar, const at::Tensor& hidden,
    const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& targets,
    c10::string_view signal);

// Factors (0 or 1/(1-p)) of the mask that `stream` of `seed` [1] has for `sample` at times
// [time, time + T): [T,B,units], of dtype float64 or float32.
at::Tensor dropout_mask(const at::Tensor& seed, int64_t stream, int64_t sample, double p,
                        int64_t time, int64_t T, int64_t B, int64_t units, at::ScalarType dtype);

}  // namespace fused_recoder
