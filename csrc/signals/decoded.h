// Signals of what the decoder predicts: their gradient enters at the top state.
#pragma once

#include "signal.h"

namespace fused_recoder {

template <typename S>
class DecodedSignal : public Signal<S> {
 public:
  using typename Signal<S>::A;
  using typename Signal<S>::Forward;
  using Signal<S>::Signal;
  using Signal<S>::p;

  void begin_forward(const Forward& pass) override;
  void gradient(int64_t t, A* delta) final;
  void enter(int64_t l, int64_t t, Recode<S>& cell) const final;
  void try_step(int64_t t, const A* alpha, A* delta) final;
  void after(int64_t t, A* delta) final { value(t, trial(), delta); }

 protected:
  // The gradient in `top` [R,H] is row_scale [R] (null: 1) times dh [R,H].
  struct TopGradient {
    const A* dh;
    const A* row_scale;
  };
  // delta [B] of the top states [R,H] of time step t, and its gradient in them.
  virtual TopGradient top_gradient(int64_t t, const S* top, A* delta) = 0;
  // delta [B] of other top states [R,H], with the targets and masks of time step t.
  virtual void value(int64_t t, const S* top, A* delta) = 0;

  const CellStates<S>* states = nullptr;

 private:
  TopGradient top{};
  bool traces = false;
  Buffer<S> trial;  // [R,H] the state whose signal is asked for
};

}  // namespace fused_recoder
