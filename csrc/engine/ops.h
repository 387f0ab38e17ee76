// The ops of torch.ops.fused_recoder, as bindings.cpp registers them. Shapes: see sequence.h.
#pragma once

#include <tuple>
#include <vector>

#include "sequence.h"

namespace fused_recoder {

// What a call of forward keeps for backward, in this order. An empty tensor stands for "absent".
struct Saved {
  at::Tensor gates;         // [L,T,B,4H] activated i, f, g, o
  at::Tensor h, c;          // [L,T,B,H] recoded states
  at::Tensor layer_inputs;  // [L-1,T,B,H] what went up between layers; absent: `h` itself
  at::Tensor step_grads;    // [L,S,T,B,H] recoding gradients; absent: step needs no gradient
  at::Tensor loss_grads;    // [T,B,H] d(nll)/d(output); absent: no loss
  // Gradients of the summed nll in the decoder; absent unless asked for.
  at::Tensor decoder_weight_grad;  // [V,H]
  at::Tensor decoder_bias_grad;    // [V]

  std::vector<at::Tensor> list() const;
  static Saved from_list(at::TensorList list);
};

// output [T,B,H], h_n [L,B,H], c_n [L,B,H], nll [T,B], delta [T,B], delta_after [T,B],
// step_size [L,S,T,B], grad_norm [L,S,T,B], saved. `nll` has no elements without a loss, the trace
// (delta_after, step_size, grad_norm) none unless asked for; `saved` is empty unless asked for.
using ForwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                 at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>>;

ForwardResult recode_forward(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                             at::TensorList weights, const OptionalTensor& decoder_weight,
                             const OptionalTensor& decoder_bias, const at::Tensor& step,
                             const OptionalTensor& targets, const OptionalTensor& mask,
                             const OptionalTensor& lengths, const OptionalTensor& seed,
                             c10::string_view signal, bool argmax, bool recode_h, bool recode_c,
                             double dropout, double output_dropout, bool loss, bool save,
                             bool save_step_grads, bool save_decoder_grads, bool trace);

// grad_input [T,B,I] (empty unless asked for), grad_h0, grad_c0 [L,B,H], grad_weights like
// weights, grad_decoder_weight [V,H], grad_decoder_bias [V] (empty unless decoder gradients were
// saved), grad_step [L,S] (empty unless step_grads were saved). The recoding gradient is a
// constant: this is the backward pass of gradient="detached".
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, std::vector<at::Tensor>,
                                  at::Tensor, at::Tensor, at::Tensor>;

// `output`, the decoder and `targets` are looked at only where a gradient arrives at nll.
BackwardResult recode_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                               const OptionalTensor& grad_c_n, const OptionalTensor& grad_nll,
                               at::TensorList saved, const at::Tensor& input, const at::Tensor& h0,
                               const at::Tensor& c0, at::TensorList weights,
                               const OptionalTensor& decoder_weight,
                               const OptionalTensor& decoder_bias, const at::Tensor& step,
                               const OptionalTensor& targets, const OptionalTensor& lengths,
                               const OptionalTensor& seed, const OptionalTensor& output,
                               c10::string_view signal, bool recode_h, bool recode_c,
                               double dropout, double output_dropout, bool need_input_grad);

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

// Factors (0 or 1/(1-p)) of the mask that `stream` of `seed` [1] has at times [time, time + T):
// [T,B,units], of dtype float64 or float32.
at::Tensor dropout_mask(const at::Tensor& seed, int64_t stream, double p, int64_t time, int64_t T,
                        int64_t B, int64_t units, at::ScalarType dtype);

}  // namespace fused_recoder
