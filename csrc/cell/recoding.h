// The recoding step of all layers at one time step: the signal's gradient enters the cells, goes
// down through them where it does, and every recoded state takes its step.
#pragma once

#include "../signals/signal.h"
#include "../steps/policy.h"
#include "states.h"

namespace fused_recoder {

template <typename S>
class Recoding {
 public:
  using A = typename AccumulateIn<S>::type;
  struct Keep {
    bool step_grads;  // what the gradient of the step sizes needs
    bool grad_h;      // what differentiating the recoding gradient needs
    bool trace;
  };
  // Matrices are packed for `calls` time steps.
  Recoding(const CellStates<S>& states, Signal<S>& signal, StepPolicy<S>& policy, const Keep& keep,
           int64_t calls);

  // After the layers of time step t; delta [T,B] gets its signal.
  void run(int64_t t);

  // ---- what it did, for the trace and the backward pass

  at::Tensor recoded() const;      // [T,B] uint8
  at::Tensor norms() const;        // [L,S,T,B] of the gradients
  at::Tensor steps_taken() const;  // [L,S,T,R] 0 where a row was not recoded

  const Buffer<A> delta;        // [T,B]
  const Buffer<A> delta_after;  // [T,B] trace
  Buffer<A> step_grads;         // [L,S,T,R,H]
  Buffer<A> grad_h;             // [L,T,R,H]

 private:
  void open_gate(int64_t t);
  Recode<S> cell(int64_t l, int64_t t) const;
  const at::Tensor& rows_open() const { return open ? open.tensor() : p.active; }

  const Problem& p;
  const CellStates<S>& states;
  Signal<S>& signal;
  StepPolicy<S>& policy;
  const Kernels<S>& kernels;
  const Launch launch;
  std::vector<ConstantMatrix<S>> to_below;  // [G -> H] gradients of the gates to the layer below
  const Buffer<uint8_t> live, active;       // [T,R]
  Buffer<uint8_t> open;                     // [T,R] with a gate: active and above the threshold
  Buffer<A> grad_norm;                      // [L,S,T,R] trace
  Buffer<A> dh;                             // [R,H]
  Buffer<S> dgates;                         // [R,G]
};

}  // namespace fused_recoder
