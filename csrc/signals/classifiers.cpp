// Weak supervision: diagnostic classifiers read recurrent states, and each recodes the state that
// it reads, and no other. delta is the sum of their cross-entropies.
#include <ATen/ops/addcmul.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "../cell/lstm.h"
#include "../cell/raw_states.h"
#include "makers.h"

namespace fused_recoder {
namespace {

template <typename S>
class Classifiers final : public Signal<S> {
  using typename Signal<S>::A;
  using typename Signal<S>::Forward;
  using typename Signal<S>::Backward;
  using Signal<S>::p;

 public:
  explicit Classifiers(const Problem& problem) : Signal<S>(problem) {
    for (int64_t number : p.spec.classifier_states) places.emplace_back(number);
  }

  // ---- forward

  void begin_forward(const Forward& pass) override {
    states = &pass.states;
    value = at::empty({p.B}, p.accum());
    scale = at::empty({p.B}, p.accum());
    for (const LinearMap& classifier : p.classifiers) {
      gradients.push_back(at::empty({p.B, p.H}, p.accum()));
      logits.push_back(at::empty({p.B, classifier.weight.size(0)}, p.accum()));
    }
    no_gradient = Buffer<A>(at::zeros({p.R, p.H}, p.accum()));
    if (pass.tries) trial = at::empty({p.R, p.H}, p.accum());
  }

  void gradient(int64_t t, A* delta) override {
    for (size_t i = 0; i < places.size(); ++i) add(i, t, state(i, t, false), delta, true);
  }

  bool descends() const override { return false; }

  void enter(int64_t l, int64_t, Recode<S>& cell) const override {
    cell.dc = no_gradient();
    for (size_t i = 0; i < places.size(); ++i)
      if (places[i].layer == l)
        (places[i].of_c ? cell.dc : cell.dh) = gradients[i].template const_data_ptr<A>();
  }

  void try_step(int64_t t, const A* alpha, A* delta) override {
    const at::Tensor steps = tensor_at(const_cast<A*>(alpha), {p.B, 1}, p.device());
    for (size_t i = 0; i < places.size(); ++i) {
      at::addcmul_out(trial, state(i, t, false), steps, gradients[i], -1);
      add(i, t, trial, delta, false);
    }
  }

  void after(int64_t t, A* delta) override {
    for (size_t i = 0; i < places.size(); ++i) add(i, t, state(i, t, true), delta, false);
  }

  // ---- backward: a gradient g = C^T (o - onehot) depends on the state that is read alone

  void begin_backward(const Backward& pass) override {
    saved = &pass.saved;
    h_bar.resize(p.L);
    c_bar = Buffer<A>(at::zeros({p.L, p.R, p.H}, p.accum()));
  }

  void curvature_of_states(int64_t t, const Buffer<A>& dh, const Buffer<A>& dc) override {
    for (at::Tensor& bar : h_bar) bar = at::Tensor();
    c_bar.tensor().zero_();
    for (size_t i = 0; i < places.size(); ++i) {
      const auto [l, of_c] = places[i];
      const RawStates raw = raw_states(saved->gates[l][t], t > 0 ? saved->c[l][t - 1] : p.c0[l]);
      const at::Tensor alpha = saved->alpha[l][p.index_of(of_c)][t];            // [B]
      const at::Tensor v = (of_c ? dc : dh).tensor()[l] * -alpha.unsqueeze(1);  // [B,H]
      const at::Tensor bar = through_gradient(i, t, of_c ? raw.c : raw.h, v);
      if (of_c)
        c_bar.tensor()[l].add_(bar);
      else
        h_bar[l] = bar;
    }
  }

  void contribute(int64_t l, CellBackward<S>& cell) const override {
    cell.c_bar = c_bar(l);
    if (h_bar[l].defined()) cell.dh_signal = h_bar[l].template const_data_ptr<A>();
  }

 private:
  at::Tensor state(size_t i, int64_t t, bool recoded) const {  // [B,H]
    const auto [l, of_c] = places[i];
    if (of_c)
      return tensor_at(recoded ? states->new_c(l, t) : states->raw_c(l, t), {p.R, p.H}, p.device());
    return tensor_at(recoded ? states->new_h(l, t) : states->raw_h(l, t), {p.R, p.H}, p.device());
  }

  const int64_t* labels_at(int64_t t) const {
    return p.labels.template const_data_ptr<int64_t>() + t * p.B;
  }

  // Adds the cross-entropy of classifier i at time step t, reading `state` [B,H], to delta [B]; the
  // first one starts it.
  void add(size_t i, int64_t t, const at::Tensor& state, A* delta, bool want_gradient) {
    const LinearMap& classifier = p.classifiers[i];
    at::addmm_out(logits[i], classifier.bias, state, classifier.weight.t());
    SoftmaxSignal<S> k{};
    k.rows = p.B;
    k.vocab = classifier.weight.size(0);
    k.signal = {SignalKind::kNll};
    k.logits = logits[i].template mutable_data_ptr<A>();
    k.targets = labels_at(t);
    k.direction = want_gradient ? logits[i].template mutable_data_ptr<S>() : nullptr;
    k.delta = i == 0 ? delta : value.template mutable_data_ptr<A>();
    k.scale = scale.template mutable_data_ptr<A>();
    this->kernels.softmax_signal(this->launch, k);
    if (i > 0) tensor_at(delta, {p.B}, p.device()).add_(value);
    if (want_gradient) at::mm_out(gradients[i], logits[i], classifier.weight);
  }

  // The cotangent [B,H] of the state, given that of its gradient.
  at::Tensor through_gradient(size_t i, int64_t t, const at::Tensor& state,
                              const at::Tensor& gradient_bar) const {
    const LinearMap& classifier = p.classifiers[i];
    const at::Tensor logits = at::addmm(classifier.bias, state, classifier.weight.t());  // [B,C]
    const at::Tensor bar = at::mm(gradient_bar, classifier.weight.t());                  // [B,C]
    SoftmaxSignalBackward<S> k{};
    k.rows = p.B;
    k.vocab = classifier.weight.size(0);
    k.signal = {SignalKind::kNll};
    k.logits = logits.template mutable_data_ptr<A>();
    k.targets = labels_at(t);
    k.u_bar = bar.template mutable_data_ptr<A>();
    k.u = logits.template mutable_data_ptr<A>();
    this->kernels.softmax_signal_backward(this->launch, k);
    return at::mm(bar, classifier.weight);
  }

  std::vector<Place> places;  // that each classifier reads

  const CellStates<S>* states = nullptr;
  std::vector<at::Tensor> gradients;  // [B,H]
  std::vector<at::Tensor> logits;     // [B,C]
  at::Tensor value, scale;            // [B]
  at::Tensor trial;                   // [B,H]
  Buffer<A> no_gradient;              // [R,H] zeros

  const Saved* saved = nullptr;
  std::vector<at::Tensor> h_bar;  // [B,H] by layer; undefined where no classifier reads h
  Buffer<A> c_bar;                // [L,B,H]
};

void check_place(int64_t number, const Problem& p) {
  const auto [layer, of_c] = Place(number);
  TORCH_CHECK_VALUE(number >= 0 && layer < p.L, "classifier_states must name one of ", p.L,
                    " layers, got ", layer);
  TORCH_CHECK_VALUE(of_c ? p.spec.recode_c : p.spec.recode_h, "a classifier reads state ",
                    of_c ? "c" : "h", ", which is not among the recoded states");
}

// sigmoid(z) is the softmax of (0, z): a binary classifier has a class of zeros before its own.
LinearMap with_two_classes(const LinearMap& map) {
  return {at::cat({at::zeros_like(map.weight), map.weight}),
          at::cat({at::zeros_like(map.bias), map.bias})};
}

}  // namespace

void check_classifiers(const Arguments& a, Problem& p) {
  const auto& places = p.spec.classifier_states;
  TORCH_CHECK_VALUE(!places.empty() && a.signal.size() == 2 * places.size(),
                    "classifiers must hold a weight and a bias for each of classifier_states, got ",
                    a.signal.size(), " tensors and ", places.size(), " states");
  for (size_t i = 0; i < places.size(); ++i) {
    check_place(places[i], p);
    for (size_t other = 0; other < i; ++other)
      TORCH_CHECK_VALUE(places[other] != places[i], "two classifiers read the same state");
    const at::Tensor &weight = a.signal[2 * i], &bias = a.signal[2 * i + 1];
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(0) > 0,
                      "a classifier's weight must have shape [C, H], got ", weight.sizes());
    const int64_t classes = weight.size(0);
    check_tensor("a classifier's weight", weight, {classes, p.H}, "[C, H]", a.input);
    check_tensor("a classifier's bias", bias, {classes}, "[C]", a.input);
    const at::ScalarType type = p.input.scalar_type();
    const LinearMap map{widen(weight).to(type), widen(bias).to(type)};
    p.classifiers.push_back(classes == 1 ? with_two_classes(map) : map);
  }
}

template <typename S>
std::unique_ptr<Signal<S>> make_classifiers(const Problem& problem) {
  return std::make_unique<Classifiers<S>>(problem);
}

template std::unique_ptr<Signal<float>> make_classifiers(const Problem&);
template std::unique_ptr<Signal<double>> make_classifiers(const Problem&);

}  // namespace fused_recoder
