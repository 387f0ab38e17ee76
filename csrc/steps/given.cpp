// Sizes that are known before: fixed, learned, or from a bound on the curvature.
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/isfinite.h>

#include "policy.h"

namespace fused_recoder {
namespace {

template <typename S>
class Given final : public StepPolicy<S> {
  using typename StepPolicy<S>::A;
  using StepPolicy<S>::p;

 public:
  explicit Given(const Problem& problem) : StepPolicy<S>(problem), step(p.step_sizes) {}

  StepSize<A> size(int64_t l, int64_t i, int64_t) const override { return {step(l, i), 0}; }
  at::Tensor sizes() const override { return p.step_sizes.view({p.L, p.spec.states(), 1, 1}); }
  at::Tensor sizes_by_instance() const override {
    return sizes().expand({p.L, p.spec.states(), p.T, p.B});
  }
  std::vector<at::Tensor> backward(const at::Tensor& step_bar, const Saved&) const override {
    return {step_bar.sum(at::IntArrayRef{2, 3})};
  }

 private:
  const Buffer<A> step;  // [L,S]
};

}  // namespace

void check_given(const Arguments& a, Problem& p) {
  TORCH_CHECK_VALUE(a.step.size() == 1, "step must hold one tensor [L, S], got ", a.step.size());
  const at::Tensor& step = a.step[0];
  check_tensor("step", step, {p.L, p.spec.states()}, "[L, S]", a.input);
  TORCH_CHECK_TYPE(at::isFloatingType(step.scalar_type()), "step must be floating point, got ",
                   step.scalar_type());
  p.step_sizes = step.to(p.h0.scalar_type()).contiguous();
  if (p.role == Role::kBackward) return;
  const at::Tensor finite = at::isfinite(p.step_sizes).all();
  if (host_reads(finite.device())) {
    TORCH_CHECK_VALUE(finite.item<bool>(), "step must be finite, got ", p.step_sizes);
  } else {
    at::_assert_async(finite, "step must be finite");
  }
}

template <typename S>
std::unique_ptr<StepPolicy<S>> make_given(const Problem& problem, int64_t) {
  return std::make_unique<Given<S>>(problem);
}

template std::unique_ptr<StepPolicy<float>> make_given(const Problem&, int64_t);
template std::unique_ptr<StepPolicy<double>> make_given(const Problem&, int64_t);

}  // namespace fused_recoder
