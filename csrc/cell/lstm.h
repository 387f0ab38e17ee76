// What an LSTM cell is made of, as far as sizes and names of states go. Kernels: kernels/kernels.h.
#pragma once

#include <cstdint>

namespace fused_recoder {

constexpr int64_t kGates = 4;  // i, f, g, o

// Recoded states are numbered layer by layer, h before c; a place names one of all there are.
struct Place {
  int64_t layer;
  bool of_c;
  explicit constexpr Place(int64_t number) : layer(number / 2), of_c(number % 2 == 1) {}
};

}  // namespace fused_recoder
