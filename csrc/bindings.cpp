// The module and every op's schema, nothing else. Implementations: engine/ops.h; fake kernels and
// autograd: fused_recoder/_ops.py.
#include <pybind11/pybind11.h>
#include <torch/library.h>
#include <torch/version.h>

#include "engine/context.h"
#include "engine/ops.h"

TORCH_LIBRARY(fused_recoder, m) {
  m.def(
      "recode_forward(Tensor input, Tensor h0, Tensor c0, Tensor[] weights, "
      "Tensor? decoder_weight, Tensor? decoder_bias, Tensor step, Tensor? targets, "
      "Tensor? mask, Tensor? lengths, Tensor? seed, str signal, bool argmax, bool recode_h, "
      "bool recode_c, float dropout, float output_dropout, bool loss, bool save, "
      "bool save_step_grads, bool save_decoder_grads, bool trace) -> (Tensor output, Tensor h_n, "
      "Tensor c_n, Tensor nll, Tensor delta, Tensor delta_after, Tensor step_size, "
      "Tensor grad_norm, Tensor[] saved)");
  m.def(
      "recode_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, "
      "Tensor? grad_nll, Tensor[] saved, Tensor input, Tensor h0, Tensor c0, Tensor[] weights, "
      "Tensor? decoder_weight, Tensor? decoder_bias, Tensor step, Tensor? targets, "
      "Tensor? lengths, Tensor? seed, Tensor? output, str signal, bool recode_h, bool recode_c, "
      "float dropout, float output_dropout, bool need_input_grad) -> (Tensor grad_input, "
      "Tensor grad_h0, Tensor grad_c0, Tensor[] grad_weights, Tensor grad_decoder_weight, "
      "Tensor grad_decoder_bias, Tensor grad_step)");
  m.def(
      "signal_gradient(Tensor hidden, Tensor weight, Tensor? bias, Tensor? targets, str signal) "
      "-> (Tensor delta, Tensor grad)");
  m.def(
      "signal_gradient_backward(Tensor delta_bar, Tensor grad_bar, Tensor hidden, Tensor weight, "
      "Tensor? bias, Tensor? targets, str signal) -> (Tensor hidden_bar, Tensor weight_bar, "
      "Tensor bias_bar)");
  m.def(
      "dropout_mask(Tensor seed, int stream, float p, int time, int steps, int rows, int units, "
      "ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(fused_recoder, CPU, m) {
  m.impl("recode_forward", fused_recoder::recode_forward);
  m.impl("recode_backward", fused_recoder::recode_backward);
  m.impl("signal_gradient", fused_recoder::signal_gradient);
  m.impl("signal_gradient_backward", fused_recoder::signal_gradient_backward);
  m.impl("dropout_mask", fused_recoder::dropout_mask);
}

PYBIND11_MODULE(_C, m) {
  m.attr("torch_version") = TORCH_VERSION;
  m.attr("build_decision") = FR_BUILD_DECISION;
  m.def("cpu_instruction_set", fused_recoder::cpu_instruction_set);
}
