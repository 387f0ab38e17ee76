// The module and every op's schema, nothing else. Implementations: ops.h; fake kernels and
// autograd: fused_recoder/_ops.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>
#include <torch/version.h>

#include "../cell/saved.h"
#include "../engine/context.h"
#include "ops.h"
#include "reader.h"

TORCH_LIBRARY(fused_recoder, m) {
  m.def(
      "recode_forward(Tensor input, Tensor h0, Tensor c0, Tensor[] weights, "
      "Tensor? decoder_weight, Tensor? decoder_bias, Tensor[] signal, Tensor[] step, Tensor? gate, "
      "Tensor? targets, Tensor? labels, Tensor? mask, Tensor? lengths, Tensor? seed, str spec) -> "
      "(Tensor output, Tensor h_n, Tensor c_n, Tensor nll, Tensor objective, Tensor delta, "
      "Tensor delta_after, Tensor step_size, Tensor grad_norm, Tensor recoded, Tensor[] saved)");
  m.def(
      "recode_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor? grad_nll, "
      "Tensor? grad_objective, Tensor[] saved, Tensor? output, Tensor input, Tensor h0, Tensor c0, "
      "Tensor[] weights, Tensor? decoder_weight, Tensor? decoder_bias, Tensor[] signal, "
      "Tensor[] step, Tensor? targets, Tensor? labels, Tensor? lengths, Tensor? seed, str spec) -> "
      "(Tensor grad_input, Tensor grad_h0, Tensor grad_c0, Tensor[] grad_weights, "
      "Tensor grad_decoder_weight, Tensor grad_decoder_bias, Tensor[] grad_step)");
  m.def(
      "signal_gradient(Tensor hidden, Tensor weight, Tensor? bias, Tensor? targets, str spec) "
      "-> (Tensor delta, Tensor grad)");
  m.def(
      "signal_gradient_backward(Tensor delta_bar, Tensor grad_bar, Tensor hidden, Tensor weight, "
      "Tensor? bias, Tensor? targets, str spec) -> (Tensor hidden_bar, Tensor weight_bar, "
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
                       const at::Tensor&, const OptionalTensor&, Tensors, Tensors,
                       const OptionalTensor&, const OptionalTensor&, std::string>())
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
  m.def("spec_fields", fused_recoder::spec_fields);
  m.def("saved_layout", [](const std::string& spec, bool upper_layers, bool ensemble, bool bias) {
    std::vector<std::tuple<std::string, std::string, bool>> layout;
    for (const auto& t :
         fused_recoder::saved_layout(fused_recoder::parse_spec(spec), upper_layers, ensemble, bias))
      layout.emplace_back(t.name, t.shape, t.is_index);
    return layout;
  });
}
