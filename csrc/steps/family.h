// Which ways there are to find step sizes. The list itself: family.cpp.
#pragma once

#include <c10/util/string_view.h>

#include <memory>

#include "../engine/problem.h"

namespace fused_recoder {

template <typename S>
class StepPolicy;

struct StepFamily {
  const char* name;
  void (*check)(const Arguments&, Problem&);  // the tensors it works with
  std::unique_ptr<StepPolicy<float>> (*make_f32)(const Problem&, int64_t calls);
  std::unique_ptr<StepPolicy<double>> (*make_f64)(const Problem&, int64_t calls);
};

// Raises ValueError that lists the names.
const StepFamily& step_family(c10::string_view name);

// The policy of a problem that recodes; it will choose `calls` times.
template <typename S>
std::unique_ptr<StepPolicy<S>> make_step_policy(const Problem& problem, int64_t calls);

}  // namespace fused_recoder
