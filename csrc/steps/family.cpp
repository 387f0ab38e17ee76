#include "family.h"

#include <string>

#include "policy.h"

namespace fused_recoder {
namespace {

const StepFamily kFamilies[] = {
    {"given", check_given, make_given<float>, make_given<double>},
    {"predicted", check_predicted, make_predicted<float>, make_predicted<double>},
    {"backtracking", check_backtracking, make_backtracking<float>, make_backtracking<double>},
};

}  // namespace

const StepFamily& step_family(c10::string_view name) {
  std::string names;
  for (const StepFamily& family : kFamilies) {
    if (name == family.name) return family;
    names += (names.empty() ? "" : ", ") + std::string(family.name);
  }
  TORCH_CHECK_VALUE(false, "step must be one of ", names, "; got '", name, "'");
}

template <>
std::unique_ptr<StepPolicy<float>> make_step_policy(const Problem& problem, int64_t calls) {
  return step_family(problem.spec.step).make_f32(problem, calls);
}

template <>
std::unique_ptr<StepPolicy<double>> make_step_policy(const Problem& problem, int64_t calls) {
  return step_family(problem.spec.step).make_f64(problem, calls);
}

}  // namespace fused_recoder
