#include "family.h"

#include <c10/util/Exception.h>

#include <string>

#include "makers.h"

namespace fused_recoder {
namespace {

template <typename S>
std::unique_ptr<Signal<S>> make_own_masks(const Problem& problem) {
  return make_unit_masks<S>(problem, /*shared=*/false);
}

// Whether listed columns are less to multiply than K whole products: with one sample (or two, and
// a large p) they are not. Products with lists are slower by about a quarter.
bool lists_pay(const Spec& spec) {
  const double p = spec.sample_p, K = spec.samples;
  const double columns = p <= 0.5 ? 1 + K * p : K * (1 - p);  // in units of all columns
  return 1.25 * columns < K;
}

template <typename S>
std::unique_ptr<Signal<S>> make_common_masks(const Problem& problem) {
  if (!lists_pay(problem.spec)) return make_unit_masks<S>(problem, /*shared=*/true);
  return kernels_for<S>(problem.device()).shared_decode == nullptr ? make_gathered_masks<S>(problem)
                                                                   : make_shared_masks<S>(problem);
}

template <typename S>
std::unique_ptr<Signal<S>> make_ensemble(const Problem& problem) {
  return problem.spec.mean_logits ? make_one_prediction<S>(problem) : make_heads<S>(problem);
}

void check_order(const Arguments&, Problem& problem) {
  const double order = problem.spec.order;
  TORCH_CHECK_VALUE(order > 0 && order <= 1e30, "order must be above 0 and at most 1e30, got ",
                    order);
}

#define FR_MAKES(maker) maker<float>, maker<double>
const SignalFamily kFamilies[] = {
    {"none", {.exists = false}, nullptr, nullptr, nullptr},
    {"nll",
     {.reads_target = true, .row_kind = SignalKind::kNll},
     nullptr,
     FR_MAKES(make_one_prediction)},
    {"surprisal",
     {.reads_target = true, .row_kind = SignalKind::kSurprisal},
     nullptr,
     FR_MAKES(make_one_prediction)},
    {"entropy", {.row_kind = SignalKind::kEntropy}, nullptr, FR_MAKES(make_one_prediction)},
    {"renyi",
     {.row_kind = SignalKind::kRenyi, .parameter = &Spec::order},
     check_order,
     FR_MAKES(make_one_prediction)},
    {"mc_unit", {.masks_top_state = true}, nullptr, FR_MAKES(make_own_masks)},
    {"mc_shared", {.masks_top_state = true}, nullptr, FR_MAKES(make_common_masks)},
    {"mc_weight", {.masks_top_state = true}, nullptr, FR_MAKES(make_weight_masks)},
    {"ensemble",
     {.needs_members = true, .row_kind = SignalKind::kEntropy},
     nullptr,
     FR_MAKES(make_ensemble)},
    {"variational", {.own_states = true}, nullptr, FR_MAKES(make_heads)},
    {"classifier", {.reads_labels = true}, check_classifiers, FR_MAKES(make_classifiers)},
};
#undef FR_MAKES

}  // namespace

const SignalFamily& signal_family(c10::string_view name) {
  std::string names;
  for (const SignalFamily& family : kFamilies) {
    if (name == family.name) return family;
    names += (names.empty() ? "" : ", ") + std::string(family.name);
  }
  TORCH_CHECK_VALUE(false, "signal must be one of ", names, "; got '", name, "'");
}

template <>
std::unique_ptr<Signal<float>> make_signal(const Problem& problem) {
  return signal_family(problem.spec.signal).make_f32(problem);
}

template <>
std::unique_ptr<Signal<double>> make_signal(const Problem& problem) {
  return signal_family(problem.spec.signal).make_f64(problem);
}

}  // namespace fused_recoder
