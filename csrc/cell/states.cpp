#include "states.h"

#include <ATen/ops/stack.h>

#include "lstm.h"

namespace fused_recoder {

template <typename S>
CellStates<S>::CellStates(const Problem& problem, bool save)
    : p(problem),
      save(save),
      output_is_raw(p.recodes_h() && !p.output_is_recoded() && p.output_p() == 0 &&
                    !p.live.defined()),
      h0(p.h0),
      c0(p.c0) {
  const int64_t T = p.T, R = p.R, H = p.H, L = p.L, G = kGates * H;
  output = Buffer<S>({T, R, H}, p.storage());
  h = Buffer<S>({L, save ? T : 2, R, H}, p.storage());
  c = Buffer<A>({L, save ? T : 2, R, H}, p.accum());
  gates = Buffer<A>({L, save ? T : 1, R, G}, p.accum());
  projected = save ? Buffer<A>(gates.tensor()[0]) : Buffer<A>({T, R, G}, p.accum());
  if (L > 1 && (p.recodes_h() || drops_between_layers()))
    layer_inputs = Buffer<S>({L - 1, save ? T : 1, R, H}, p.storage());
  if (p.recodes_h()) h_raw = Buffer<S>({L, R, H}, p.storage());
  if (p.recodes_c()) c_raw = Buffer<A>({L, R, H}, p.accum());
  if (p.output_is_recoded()) decoder_input = Buffer<S>({R, H}, p.storage());
}

template <typename S>
at::Tensor CellStates<S>::raw(int64_t t, bool of_c) const {
  std::vector<at::Tensor> states;
  for (int64_t l = 0; l < p.L; ++l)
    states.push_back(tensor_at(of_c ? raw_c(l, t) : raw_h(l, t), {p.R, p.H}, p.device()));
  return at::stack(states);
}

template class CellStates<float>;
template class CellStates<double>;

}  // namespace fused_recoder
