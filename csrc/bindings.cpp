// The module and every op's schema, nothing else. Implementations: engine/ops.h; fake kernels and
// autograd: fused_recoder/_ops.py.
#include <pybind11/pybind11.h>
#include <torch/library.h>
#include <torch/version.h>

#include "engine/context.h"
#include "engine/ops.h"
#include "engine/reader.h"

TORCH_LIBRARY(fused_recoder, m) {
  m.def(
      "recode_forward(Tensor input, Tensor h0, Tensor c0, Tensor[] weights, "
      "Tensor? decoder_weight, Tensor? decoder_bias, Tensor[] classifiers, Tensor step, "
      "Tensor[] step_network, Tensor? gate, Tensor? targets, Tensor? labels, Tensor? mask, "
      "Tensor? lengths, Tensor? seed, str signal, bool argmax, int samples, float sample_p, "
      "bool mean_logits, int[] classifier_states, bool recode_h, bool recode_c, float dropout, "
      "float output_dropout, str step_kind, float shrink, int trials, int time, bool loss, "
      "bool exact, bool save, bool save_step_grads, bool save_decoder_grads, bool trace) -> "
      "(Tensor output, Tensor h_n, Tensor c_n, Tensor nll, Tensor objective, Tensor delta, "
      "Tensor delta_after, Tensor step_size, Tensor grad_norm, Tensor recoded, Tensor[] saved)");
  m.def(
      "recode_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, "
      "Tensor? grad_nll, Tensor? grad_objective, Tensor[] saved, Tensor input, Tensor h0, "
      "Tensor c0, Tensor[] weights, Tensor? decoder_weight, Tensor? decoder_bias, "
      "Tensor[] classifiers, Tensor step, Tensor[] step_network, Tensor? targets, Tensor? labels, "
      "Tensor? lengths, Tensor? seed, Tensor? output, str signal, bool argmax, int samples, "
      "float sample_p, bool mean_logits, int[] classifier_states, bool recode_h, bool recode_c, "
      "float dropout, float output_dropout, str step_kind, int time, bool exact, "
      "bool need_input_grad, bool need_step_grad, bool need_decoder_grad) -> "
      "(Tensor grad_input, Tensor grad_h0, Tensor grad_c0, Tensor[] grad_weights, "
      "Tensor grad_decoder_weight, Tensor grad_decoder_bias, Tensor grad_step, "
      "Tensor[] grad_step_network)");
  m.def(
      "signal_gradient(Tensor hidden, Tensor weight, Tensor? bias, Tensor? targets, str signal) "
      "-> (Tensor delta, Tensor grad)");
  m.def(
      "signal_gradient_backward(Tensor delta_bar, Tensor grad_bar, Tensor hidden, Tensor weight, "
      "Tensor? bias, Tensor? targets, str signal) -> (Tensor hidden_bar, Tensor weight_bar, "
      "Tensor bias_bar)");
  m.def(
      "dropout_mask(Tensor seed, int stream, int sample, float p, int time, int steps, int rows, "
      "int units, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_FRAGMENT(fused_recoder, m) {
  using fused_recoder::OptionalTensor;
  using Tensors = std::vector<at::Tensor>;
  m.class_<fused_recoder::Reader>("Reader")
      .def(torch::init<const at::Tensor&, const at::Tensor&, const at::Tensor&, Tensors,
                       const at::Tensor&, const OptionalTensor&, Tensors, const at::Tensor&,
                       Tensors, const OptionalTensor&, const OptionalTensor&, std::string, bool,
                       int64_t, double, bool, std::vector<int64_t>, bool, bool, std::string, double,
                       int64_t, int64_t, double>())
      .def("feed", &fused_recoder::Reader::feed)
      .def("finish", &fused_recoder::Reader::finish)
      .def("h", &fused_recoder::Reader::h)
      .def("c", &fused_recoder::Reader::c)
      .def("delta", &fused_recoder::Reader::delta)
      .def("time", &fused_recoder::Reader::time)
      .def("pending", &fused_recoder::Reader::pending);
}

// The engine runs on every device that has a backend (engine/device.h).
void implement(torch::Library& m) {
  m.impl("recode_forward", fused_recoder::recode_forward);
  m.impl("recode_backward", fused_recoder::recode_backward);
  m.impl("signal_gradient", fused_recoder::signal_gradient);
  m.impl("signal_gradient_backward", fused_recoder::signal_gradient_backward);
  m.impl("dropout_mask", fused_recoder::dropout_mask);
}

TORCH_LIBRARY_IMPL(fused_recoder, CPU, m) { implement(m); }
#ifdef FR_CUDA
TORCH_LIBRARY_IMPL(fused_recoder, CUDA, m) { implement(m); }
#endif

PYBIND11_MODULE(_C, m) {
  m.attr("torch_version") = TORCH_VERSION;
  m.attr("build_decision") = FR_BUILD_DECISION;
  m.def("cpu_instruction_set", fused_recoder::cpu_instruction_set);
}
