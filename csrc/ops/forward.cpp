
#include "guard.h"
#include "ops.h"

namespace fused_recoder {

ForwardResult recode_forward(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                             at::TensorList weights, const OptionalTensor& decoder_weight,
                             const OptionalTensor& decoder_bias, at::TensorList signal,
                             at::TensorList step, const OptionalTensor& gate,
                             const OptionalTensor& targets, const OptionalTensor& labels,
                             const OptionalTensor& mask, const OptionalTensor& lengths,
                             const OptionalTensor& seed, c10::string_view spec) {
  const OpGuard guard(input);
  const Problem problem = make_problem({input, h0, c0, weights, decoder_weight, decoder_bias,
                                        signal, step, gate, targets, labels, mask, lengths, seed},
                                       parse_spec(spec), Role::kForward);
  return problem.input.scalar_type() == at::kDouble ? Forward<double>(problem).run()
                                                    : Forward<float>(problem).run();
}

}  // namespace fused_recoder
