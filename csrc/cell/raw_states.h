// The unrecoded states of cells, from their activated gates: forward does not keep them.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

namespace fused_recoder {

struct RawStates {
  at::Tensor h, c;  // [..,R,H]
};

// gates [..,R,4H] (i, f, g, o), c_prev [..,R,H]
inline RawStates raw_states(const at::Tensor& gates, const at::Tensor& c_prev) {
  const auto part = gates.chunk(4, -1);
  const at::Tensor c = part[1] * c_prev + part[0] * part[2];
  return {part[3] * c.tanh(), c};
}

}  // namespace fused_recoder
