// Starts large and shrinks until the signal of what it would lead to falls, for every instance by
// itself; all states of an instance take the same step.
#include <ATen/ops/zeros_like.h>

#include "policy.h"

namespace fused_recoder {
namespace {

template <typename S>
class Backtracking final : public StepPolicy<S> {
  using typename StepPolicy<S>::A;
  using StepPolicy<S>::p;

 public:
  Backtracking(const Problem& problem, int64_t calls)
      : StepPolicy<S>(problem), kernels(kernels_for<S>(p.device())), launch(launch_on(p.device())) {
    if (calls == 0) return;
    chosen = Buffer<A>({1, 1, p.T, p.R}, p.accum());
    settled = Buffer<uint8_t>({p.B}, p.accum().dtype(at::kByte));
    trial_delta = Buffer<A>({p.B}, p.accum());
  }

  bool tries() const override { return true; }

  void choose(int64_t t, const CellStates<S>&, Signal<S>& signal, const A* delta) override {
    settled.tensor().zero_();
    chosen.tensor()[0][0][t].copy_(p.step_sizes[0][0].expand({p.R}));
    for (int64_t i = 1; i <= p.spec.trials; ++i) {
      signal.try_step(t, chosen(0, 0, t), trial_delta());
      const A shrink = i == p.spec.trials ? A(0) : A(p.spec.shrink);
      kernels.trial_verdict(
          launch, TrialVerdict<A>{p.samples_per_instance(), p.B, delta, trial_delta(), shrink,
                                  settled(), chosen(0, 0, t)});
      // Looking ends the search early; where looking would synchronise, all trials are made.
      if (host_reads(p.device()) && settled.tensor().all().template item<bool>()) break;
    }
  }
  StepSize<A> size(int64_t, int64_t, int64_t t) const override { return {chosen(0, 0, t), 1}; }
  at::Tensor sizes() const override { return chosen.tensor(); }
  at::Tensor sizes_by_instance() const override {
    return sizes().narrow(3, 0, p.B).expand({p.L, p.spec.states(), p.T, p.B});
  }
  // What is searched for is a constant.
  std::vector<at::Tensor> backward(const StepBars&, const Saved&) const override {
    return {at::zeros_like(p.step_sizes)};
  }

 private:
  const Kernels<S>& kernels;
  const Launch launch;
  Buffer<A> chosen;         // [1,1,T,R]
  Buffer<uint8_t> settled;  // [B]
  Buffer<A> trial_delta;    // [B]
};

}  // namespace

void check_backtracking(const Arguments& a, Problem& p) {
  check_given(a, p);
  TORCH_CHECK_VALUE(!p.unit_sizes.defined(), "backtracking takes one step for all units: [L, S]");
  TORCH_CHECK_VALUE(p.spec.trials >= 1 && p.spec.shrink > 0 && p.spec.shrink < 1,
                    "backtracking needs trials >= 1 and shrink in (0, 1), got ", p.spec.trials,
                    " and ", p.spec.shrink);
}

template <typename S>
std::unique_ptr<StepPolicy<S>> make_backtracking(const Problem& problem, int64_t calls) {
  return std::make_unique<Backtracking<S>>(problem, calls);
}

template std::unique_ptr<StepPolicy<float>> make_backtracking(const Problem&, int64_t);
template std::unique_ptr<StepPolicy<double>> make_backtracking(const Problem&, int64_t);

}  // namespace fused_recoder
