// The ops of torch.ops.fused_recoder, as bindings.cpp registers them. Dimensions: engine/problem.h;
// results: engine/forward.h and engine/backward.h. `spec`: ops/spec.h.
#pragma once

#include <tuple>
#include <vector>

#include "../engine/backward.h"
#include "../engine/forward.h"
#include "../engine/problem.h"

namespace fused_recoder {

// Shapes of the tensors: struct Arguments.
ForwardResult recode_forward(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                             at::TensorList weights, const OptionalTensor& decoder_weight,
                             const OptionalTensor& decoder_bias, at::TensorList signal,
                             at::TensorList step, const OptionalTensor& gate,
                             const OptionalTensor& targets, const OptionalTensor& labels,
                             const OptionalTensor& mask, const OptionalTensor& lengths,
                             const OptionalTensor& seed, c10::string_view spec);

// `saved` and `spec` are those of the forward pass. `output`, what it returned, is looked at only
// where a gradient arrives at a loss.
BackwardResult recode_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                               const OptionalTensor& grad_c_n, const OptionalTensor& grad_nll,
                               const OptionalTensor& grad_objective, at::TensorList saved,
                               const OptionalTensor& output, const at::Tensor& input,
                               const at::Tensor& h0, const at::Tensor& c0, at::TensorList weights,
                               const OptionalTensor& decoder_weight,
                               const OptionalTensor& decoder_bias, at::TensorList signal,
                               at::TensorList step, const OptionalTensor& targets,
                               const OptionalTensor& labels, const OptionalTensor& lengths,
                               const OptionalTensor& seed, c10::string_view spec);

// hidden [N,H], weight [V,H], bias [V], targets [N] -> delta [N], d(delta)/d(hidden) [N,H]
std::tuple<at::Tensor, at::Tensor> signal_gradient(const at::Tensor& hidden,
                                                   const at::Tensor& weight,
                                                   const OptionalTensor& bias,
                                                   const OptionalTensor& targets,
                                                   c10::string_view spec);

// Cotangents of hidden [N,H], weight [V,H] and bias [V], given those of delta [N] and grad [N,H].
std::tuple<at::Tensor, at::Tensor, at::Tensor> signal_gradient_backward(
    const at::Tensor& delta_bar, const at::Tensor& grad_bar, const at::Tensor& hidden,
    const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& targets,
    c10::string_view spec);

// Factors (0 or 1/(1-p)) of the mask that `stream` of `seed` [1] has for `sample` at times
// [time, time + T): [T,B,units], of dtype float64 or float32.
at::Tensor dropout_mask(const at::Tensor& seed, int64_t stream, int64_t sample, double p,
                        int64_t time, int64_t T, int64_t B, int64_t units, at::ScalarType dtype);

}  // namespace fused_recoder
