
#include "guard.h"
#include "ops.h"

namespace fused_recoder {
namespace {

void check_gradient(const char* name, const OptionalTensor& grad, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(!grad.has_value() || grad->sizes() == shape, name, " must have shape ", shape,
                    ", got ", grad.has_value() ? grad->sizes() : at::IntArrayRef());
}

void check_cotangents(const Cotangents& bar, const OptionalTensor& output, const Problem& p) {
  check_gradient("grad_output", bar.output, {p.T, p.R, p.H});
  check_gradient("grad_h_n", bar.h_n, {p.L, p.R, p.H});
  check_gradient("grad_c_n", bar.c_n, {p.L, p.R, p.H});
  check_gradient("grad_nll", bar.nll, {p.T, p.B});
  check_gradient("grad_objective", bar.objective, {p.T, p.B});
  if (!bar.of_loss()) return;
  TORCH_CHECK_VALUE(p.spec.loss, "a gradient of the loss was given, but no loss was computed");
  TORCH_CHECK_VALUE(output.has_value(), "output must be given with the gradient of a loss");
  check_gradient("output", output, {p.T, p.R, p.H});
}

}  // namespace

BackwardResult recode_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                               const OptionalTensor& grad_c_n, const OptionalTensor& grad_nll,
                               const OptionalTensor& grad_objective, at::TensorList saved_list,
                               const OptionalTensor& output, const at::Tensor& input,
                               const at::Tensor& h0, const at::Tensor& c0, at::TensorList weights,
                               const OptionalTensor& decoder_weight,
                               const OptionalTensor& decoder_bias, at::TensorList signal,
                               at::TensorList step, const OptionalTensor& targets,
                               const OptionalTensor& labels, const OptionalTensor& lengths,
                               const OptionalTensor& seed, c10::string_view spec) {
  const OpGuard guard(input);
  const Problem problem = make_problem({input,
                                        h0,
                                        c0,
                                        weights,
                                        decoder_weight,
                                        decoder_bias,
                                        signal,
                                        step,
                                        {},
                                        targets,
                                        labels,
                                        {},
                                        lengths,
                                        seed},
                                       parse_spec(spec), Role::kBackward);
  TORCH_CHECK_VALUE(problem.spec.save,
                    "recode_forward was called with save=False: there is nothing to differentiate");
  const Saved saved = Saved::from_list(saved_list, problem);
  const Cotangents bar{grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective};
  check_cotangents(bar, output, problem);
  return problem.input.scalar_type() == at::kDouble
             ? Backward<double>(problem, saved, bar, output).run()
             : Backward<float>(problem, saved, bar, output).run();
}

}  // namespace fused_recoder
