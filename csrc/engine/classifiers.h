// Weak supervision: diagnostic classifiers read recurrent states, and each recodes the state that
// it reads. delta is the sum of their cross-entropies.
#pragma once

#include "context.h"
#include "sequence.h"

namespace fused_recoder {

template <typename S>
class Classifiers {
 public:
  using A = typename AccumulateIn<S>::type;
  explicit Classifiers(const Sequence& s);

  int64_t count() const { return int64_t(s.classifiers.size()); }
  int64_t layer(int64_t i) const { return s.options.classifier_states[i] / 2; }
  bool reads_c(int64_t i) const { return s.options.classifier_states[i] % 2 == 1; }

  // Adds the cross-entropy [B] of classifier i at step t, reading `state` [B,H], to delta; the
  // first one starts it. With `want_gradient`, gradient(i) is its gradient in the state.
  void add(int64_t i, int64_t t, const at::Tensor& state, const at::Tensor& delta,
           bool want_gradient);
  const at::Tensor& gradient(int64_t i) const { return gradients_[i]; }  // [B,H]

 private:
  const Sequence& s;
  const Kernels<S>& kernels;
  const Launch launch;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> logits_;  // [B,C]
  at::Tensor value_, scale_;        // [B]
};

}  // namespace fused_recoder
