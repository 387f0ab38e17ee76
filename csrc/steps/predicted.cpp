// softplus(MLP(state)), one network per (layer, state), ReLU in between. The state is a constant
// for it, so its backward pass is one batched call after BPTT.
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/softplus_backward.h>

#include "../cell/raw_states.h"
#include "policy.h"

namespace fused_recoder {
namespace {

// One network, called again and again with R rows.
template <typename S>
class Network {
 public:
  using A = typename AccumulateIn<S>::type;
  Network(const std::vector<LinearMap>& maps, int64_t calls, int64_t rows)
      : rows_(rows), maps_(maps) {
    for (const LinearMap& map : maps) {
      matrices_.emplace_back(Precision::kSame, map.weight, true, calls, rows);
      if (matrices_.size() < maps.size())
        hidden_.push_back(at::empty({rows, map.weight.size(0)}, map.weight.options()));
    }
  }

  // states [R,H] -> what the softplus of is the sizes [R]
  void predict(const S* states, A* before_softplus) const {
    const S* x = states;
    for (size_t i = 0; i < maps_.size(); ++i) {
      const bool last = i + 1 == maps_.size();
      A* out = last ? before_softplus : hidden_[i].template mutable_data_ptr<A>();
      matrices_[i].multiply(rows_, x, out, maps_[i].bias.template const_data_ptr<A>(),
                            /*accumulate=*/false, /*relu=*/!last);
      x = out;
    }
  }

 private:
  int64_t rows_;
  std::vector<LinearMap> maps_;
  std::vector<ConstantMatrix<S>> matrices_;
  std::vector<at::Tensor> hidden_;  // [R, out of each map but the last]
};

// Gradients of weights and biases, given the states [N,H] and the cotangents [N] of the sizes.
std::vector<at::Tensor> network_backward(const std::vector<LinearMap>& maps,
                                         const at::Tensor& states, const at::Tensor& bar) {
  std::vector<at::Tensor> inputs = {states};  // of each map, [N,in]
  for (size_t i = 0; i + 1 < maps.size(); ++i)
    inputs.push_back(at::relu(at::addmm(maps[i].bias, inputs.back(), maps[i].weight.t())));
  const at::Tensor z = at::addmm(maps.back().bias, inputs.back(), maps.back().weight.t());  // [N,1]
  at::Tensor d = at::softplus_backward(bar.unsqueeze(1), z, /*beta=*/1, /*threshold=*/20);
  std::vector<at::Tensor> gradients(2 * maps.size());
  for (int64_t i = int64_t(maps.size()) - 1; i >= 0; --i) {
    gradients[2 * i] = d.t().mm(inputs[i]);
    gradients[2 * i + 1] = d.sum(0);
    if (i > 0) d = d.mm(maps[i].weight) * (inputs[i] > 0);
  }
  return gradients;
}

template <typename S>
class Predicted final : public StepPolicy<S> {
  using typename StepPolicy<S>::A;
  using StepPolicy<S>::p;

 public:
  // calls = 0: for the backward pass alone.
  Predicted(const Problem& problem, int64_t calls) : StepPolicy<S>(problem) {
    if (calls == 0) return;
    for (const auto& maps : p.step_network) networks.emplace_back(maps, calls, p.R);
    chosen = Buffer<A>({p.L, p.spec.states(), p.T, p.R}, p.accum());
  }

  void choose(int64_t t, const CellStates<S>& states, Signal<S>&, const A*) override {
    const int64_t S_ = p.spec.states(), of_c = p.index_of(true);
    for (int64_t l = 0; l < p.L; ++l) {
      if (p.spec.recode_h) networks[l * S_].predict(states.raw_h(l, t), chosen(l, 0, t));
      if (p.spec.recode_c) networks[l * S_ + of_c].predict(states.raw_c(l, t), chosen(l, of_c, t));
    }
    at::Tensor at_t = chosen.tensor().select(2, t);  // [L,S,R]
    at::softplus_out(at_t, at_t);
  }
  StepSize<A> size(int64_t l, int64_t i, int64_t t) const override { return {chosen(l, i, t), 1}; }
  at::Tensor sizes() const override { return chosen.tensor(); }
  // The mean over the samples of an instance.
  at::Tensor sizes_by_instance() const override {
    return sizes().view({p.L, p.spec.states(), p.T, p.samples_per_instance(), p.B}).mean(3);
  }

  std::vector<at::Tensor> backward(const StepBars& bar, const Saved& saved) const override {
    std::vector<at::Tensor> gradients;
    const int64_t states = p.spec.states(), N = p.T * p.R;
    for (int64_t l = 0; l < p.L; ++l) {
      at::Tensor c_prev = p.c0[l].unsqueeze(0);
      if (p.T > 1) c_prev = at::cat({c_prev, saved.c[l].narrow(0, 0, p.T - 1)});
      const RawStates raw = raw_states(saved.gates[l], c_prev);  // forward did not keep them
      for (int64_t i = 0; i < states; ++i) {
        const at::Tensor& state = p.spec.recode_h && i == 0 ? raw.h : raw.c;
        const auto of_network = network_backward(
            p.step_network[l * states + i], state.reshape({N, p.H}), bar.by_row[l][i].reshape({N}));
        gradients.insert(gradients.end(), of_network.begin(), of_network.end());
      }
    }
    return gradients;
  }

 private:
  std::vector<Network<S>> networks;  // [L*S]
  Buffer<A> chosen;                  // [L,S,T,R]
};

}  // namespace

void check_predicted(const Arguments& a, Problem& p) {
  const int64_t networks = p.L * p.spec.states(), tensors = int64_t(a.step.size());
  TORCH_CHECK_VALUE(tensors > 0 && tensors % (2 * networks) == 0,
                    "step must hold weights and biases of a network for each of ", networks,
                    " states, got ", tensors, " tensors");
  const int64_t maps = tensors / (2 * networks);
  const at::ScalarType compute = p.h0.scalar_type();
  for (int64_t n = 0; n < networks; ++n) {
    std::vector<LinearMap> network;
    int64_t in = p.H;
    for (int64_t i = 0; i < maps; ++i) {
      const at::Tensor& weight = a.step[2 * (n * maps + i)];
      const at::Tensor& bias = a.step[2 * (n * maps + i) + 1];
      TORCH_CHECK_VALUE(weight.dim() == 2, "step: weights of networks must be matrices, got ",
                        weight.sizes());
      const int64_t out = i == maps - 1 ? 1 : weight.size(0);
      check_tensor("a weight of a step network", weight, {out, in}, "[out, in]", a.input);
      check_tensor("a bias of a step network", bias, {out}, "[out]", a.input);
      network.push_back({weight.to(compute).contiguous(), bias.to(compute).contiguous()});
      in = out;
    }
    p.step_network.push_back(network);
  }
}

template <typename S>
std::unique_ptr<StepPolicy<S>> make_predicted(const Problem& problem, int64_t calls) {
  return std::make_unique<Predicted<S>>(problem, calls);
}

template std::unique_ptr<StepPolicy<float>> make_predicted(const Problem&, int64_t);
template std::unique_ptr<StepPolicy<double>> make_predicted(const Problem&, int64_t);

}  // namespace fused_recoder
