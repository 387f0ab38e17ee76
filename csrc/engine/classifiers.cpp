#include "classifiers.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

namespace fused_recoder {

template <typename S>
Classifiers<S>::Classifiers(const Sequence& sequence)
    : s(sequence),
      kernels(kernels_for<S>(s.input.device())),
      launch(launch_on(s.input.device())),
      value_(at::empty({s.B}, s.h0.options())),
      scale_(at::empty({s.B}, s.h0.options())) {
  for (const LinearMap& classifier : s.classifiers) {
    gradients_.push_back(at::empty({s.B, s.H}, s.h0.options()));
    logits_.push_back(at::empty({s.B, classifier.weight.size(0)}, s.h0.options()));
  }
}

template <typename S>
void Classifiers<S>::add(int64_t i, int64_t t, const at::Tensor& state, const at::Tensor& delta,
                         bool want_gradient) {
  const LinearMap& classifier = s.classifiers[i];
  at::addmm_out(logits_[i], classifier.bias, state, classifier.weight.t());
  SoftmaxSignal<S> p{};
  p.rows = s.B;
  p.vocab = classifier.weight.size(0);
  p.kind = SignalKind::kNll;
  p.logits = logits_[i].template mutable_data_ptr<A>();
  p.targets = s.labels.const_data_ptr<int64_t>() + t * s.B;
  p.direction = want_gradient ? logits_[i].template mutable_data_ptr<S>() : nullptr;
  p.delta = (i == 0 ? delta : value_).template mutable_data_ptr<A>();
  p.scale = scale_.template mutable_data_ptr<A>();
  kernels.softmax_signal(launch, p);
  if (i > 0) delta.add_(value_);
  if (want_gradient) at::mm_out(gradients_[i], logits_[i], classifier.weight);
}

template class Classifiers<float>;
template class Classifiers<double>;

}  // namespace fused_recoder
