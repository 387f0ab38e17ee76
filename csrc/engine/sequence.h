// The arguments of a recoded sequence as the ops receive them, checked once, in one place.
// Used by forward.cpp, backward.cpp and signal_gradient.cpp.
//
// Dimensions: T time, B batch, I input, H hidden, L layers, V vocabulary, S recoded states
// ("h" before "c").
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "../kernels/math.h"

namespace fused_recoder {

using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kIgnoreTarget = -100;

// "none", "surprisal", "nll" or "entropy".
SignalKind parse_signal(c10::string_view name);

struct Options {
  SignalKind signal;
  bool argmax;  // gold signals: recode towards the most probable token, not the target
  bool recode_h, recode_c;
  double dropout;         // between layers
  double output_dropout;  // between the top layer and the decoder
  bool loss;              // also compute the negative log-likelihood of the targets

  int64_t states() const { return int64_t(recode_h) + int64_t(recode_c); }
  bool recodes() const { return signal != SignalKind::kNone && states() > 0; }
  bool decodes() const { return recodes() || loss; }
  // The recoding gradient is a multiple of the loss's: they share their GEMM with the decoder.
  bool loss_shares_gradient() const { return loss && recodes() && reads_target(signal) && !argmax; }
  // Signals that see the gold token predict from the unrecoded state (no label may leak), the
  // others from the recoded one.
  bool output_is_recoded() const { return recodes() && recode_h && !reads_target(signal); }
};

struct Layer {
  at::Tensor w_ih;  // [4H, I or H]
  at::Tensor w_hh;  // [4H, H]
  at::Tensor bias;  // [4H] b_ih + b_hh; undefined without bias
};

// Half precision on the CPU is computed in float: widened here, once per sequence.
at::Tensor widen(const at::Tensor& t);

struct Sequence {
  Options options;
  int64_t T, B, I, H, L, V;
  at::ScalarType io_type;     // of input and output
  at::ScalarType state_type;  // of h_n and c_n

  at::Tensor input;   // [T,B,I]
  at::Tensor h0, c0;  // [L,B,H]
  std::vector<Layer> layers;
  at::Tensor decoder_weight;  // [V,H] or undefined
  at::Tensor decoder_bias;    // [V] or undefined
  at::Tensor step;            // [L,S] of the accumulation type
  at::Tensor targets;         // [T,B] int64 or undefined; -100 behind the end and where ignored
  at::Tensor live;            // [T,B] uint8 or undefined: inside its sequence
  at::Tensor active;          // [T,B] uint8 or undefined: to be recoded
  at::Tensor seed;            // [1] int64 or undefined

  Dropout layer_dropout(int64_t layer) const {
    return make_dropout(seed_pointer(), kLayerStream + layer, options.dropout);
  }
  Dropout output_dropout() const {
    return make_dropout(seed_pointer(), kOutputStream, options.output_dropout);
  }
  // Of the connection that leads upwards from `layer`.
  Dropout dropout_above(int64_t layer) const {
    return layer == L - 1 ? output_dropout() : layer_dropout(layer);
  }

 private:
  const int64_t* seed_pointer() const {
    return seed.defined() ? seed.const_data_ptr<int64_t>() : nullptr;
  }
};

// Checks everything; raises ValueError or TypeError that name the argument.
Sequence make_sequence(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                       at::TensorList weights, const OptionalTensor& decoder_weight,
                       const OptionalTensor& decoder_bias, const at::Tensor& step,
                       const OptionalTensor& targets, const OptionalTensor& mask,
                       const OptionalTensor& lengths, const OptionalTensor& seed,
                       const Options& options);

void check_targets_in_range(const at::Tensor& targets, int64_t vocab);

}  // namespace fused_recoder
