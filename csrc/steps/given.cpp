// Sizes that are known before, of whole states or of single units: fixed, learned, or from a bound
// on the curvature.
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones.h>

#include "policy.h"

namespace fused_recoder {
namespace {

template <typename S>
class Given final : public StepPolicy<S> {
  using typename StepPolicy<S>::A;
  using StepPolicy<S>::p;

 public:
  explicit Given(const Problem& problem)
      : StepPolicy<S>(problem), step(p.step_sizes), unit(p.unit_sizes) {}

  StepSize<A> size(int64_t l, int64_t i, int64_t) const override {
    return {step(l, i), 0, unit(l, i)};
  }
  at::Tensor sizes() const override { return p.step_sizes.view({p.L, p.spec.states(), 1, 1}); }
  // The mean of the units.
  at::Tensor sizes_by_instance() const override {
    const at::Tensor mean = unit ? p.unit_sizes.mean(2) : p.step_sizes;  // [L,S]
    return mean.view({p.L, p.spec.states(), 1, 1}).expand({p.L, p.spec.states(), p.T, p.B});
  }
  std::vector<at::Tensor> backward(const StepBars& bar, const Saved&) const override {
    return {unit ? bar.by_unit.sum(2) : bar.by_row.sum(at::IntArrayRef{2, 3})};
  }

 private:
  const Buffer<A> step;  // [L,S]
  const Buffer<A> unit;  // [L,S,H] or absent
};

}  // namespace

void check_given(const Arguments& a, Problem& p) {
  TORCH_CHECK_VALUE(a.step.size() == 1, "step must hold one tensor, got ", a.step.size());
  const at::Tensor& step = a.step[0];
  TORCH_CHECK_TYPE(at::isFloatingType(step.scalar_type()), "step must be floating point, got ",
                   step.scalar_type());
  const at::Tensor sizes = step.to(p.h0.scalar_type()).contiguous();
  if (step.dim() == 3) {
    check_tensor("step", step, {p.L, p.spec.states(), p.H}, "[L, S, H]", a.input);
    p.unit_sizes = sizes;
    p.step_sizes = at::ones({p.L, p.spec.states()}, p.accum());
  } else {
    check_tensor("step", step, {p.L, p.spec.states()}, "[L, S] or [L, S, H]", a.input);
    p.step_sizes = sizes;
  }
  if (p.role == Role::kBackward) return;
  const at::Tensor finite = at::isfinite(sizes).all();
  if (host_reads(finite.device())) {
    TORCH_CHECK_VALUE(finite.item<bool>(), "step must be finite, got ", sizes);
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
