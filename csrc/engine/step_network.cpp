#include "step_network.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/softplus_backward.h>

namespace fused_recoder {

template <typename S>
StepNetwork<S>::StepNetwork(const std::vector<LinearMap>& maps, int64_t calls, int64_t rows)
    : rows_(rows), maps_(maps) {
  for (const LinearMap& map : maps) {
    matrices_.emplace_back(map.weight, true, calls, rows);
    if (matrices_.size() < maps.size())
      hidden_.push_back(at::empty({rows, map.weight.size(0)}, map.weight.options()));
  }
}

template <typename S>
void StepNetwork<S>::predict(const S* states, A* before_softplus) const {
  const S* x = states;
  for (size_t i = 0; i < maps_.size(); ++i) {
    const bool last = i + 1 == maps_.size();
    A* out = last ? before_softplus : hidden_[i].template mutable_data_ptr<A>();
    matrices_[i].multiply(rows_, x, out, maps_[i].bias.template const_data_ptr<A>(),
                          /*accumulate=*/false, /*relu=*/!last);
    x = out;
  }
}

template class StepNetwork<float>;
template class StepNetwork<double>;

std::vector<at::Tensor> step_network_backward(const std::vector<LinearMap>& maps,
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

}  // namespace fused_recoder
