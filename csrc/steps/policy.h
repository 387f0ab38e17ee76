// How far a recoding step goes. One class per way of finding the sizes.
#pragma once

#include "../cell/saved.h"
#include "../cell/states.h"
#include "../signals/signal.h"
#include "family.h"

namespace fused_recoder {

// Cotangents of the sizes; undefined where they are not asked for.
struct StepBars {
  at::Tensor by_row;   // [L,S,T,R] of whole states
  at::Tensor by_unit;  // [L,S,R,H] of single units, summed over time
};

template <typename S>
class StepPolicy {
 public:
  using A = typename AccumulateIn<S>::type;
  explicit StepPolicy(const Problem& problem) : p(problem) {}
  virtual ~StepPolicy() = default;

  // ---- forward

  // Whether it asks the signal what a step would give.
  virtual bool tries() const { return false; }
  // The sizes for time step t, whose signal is delta [B] and whose gradient is known.
  virtual void choose(int64_t, const CellStates<S>&, Signal<S>&, const A* /*delta*/) {}
  // Those of state i (of the S recoded ones) of layer l.
  virtual StepSize<A> size(int64_t l, int64_t i, int64_t t) const = 0;
  // All that were chosen, [L,S,T,R] or smaller where they are the same; without factors of units.
  virtual at::Tensor sizes() const = 0;
  // For the trace: per instance, [L,S,T,B].
  virtual at::Tensor sizes_by_instance() const = 0;

  // ---- backward

  // Gradients of the tensors that it works with (Arguments::step), given those of the sizes.
  virtual std::vector<at::Tensor> backward(const StepBars& bar, const Saved& saved) const = 0;

 protected:
  const Problem& p;
};

// The families, one file each. Who picks among them: family.cpp.
template <typename S>
std::unique_ptr<StepPolicy<S>> make_given(const Problem& problem, int64_t calls);
void check_given(const Arguments& arguments, Problem& problem);

template <typename S>
std::unique_ptr<StepPolicy<S>> make_predicted(const Problem& problem, int64_t calls);
void check_predicted(const Arguments& arguments, Problem& problem);

template <typename S>
std::unique_ptr<StepPolicy<S>> make_backtracking(const Problem& problem, int64_t calls);
void check_backtracking(const Arguments& arguments, Problem& problem);

}  // namespace fused_recoder
