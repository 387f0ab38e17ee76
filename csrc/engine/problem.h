// What an op is asked to do: its tensors and its spec, checked once, in one place. Forward,
// backward and reader all work on it.
//
// Dimensions, in the whole code base: T time, B batch instances, I input, H hidden, L layers, V
// vocabulary, S recoded states ("h" before "c"), K samples or ensemble members, G = 4H gates, R
// rows: B, or K * B (row k * B + b) where every sample has states of its own.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "../kernels/math.h"
#include "../ops/spec.h"
#include "../signals/family.h"

namespace fused_recoder {

using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kIgnoreTarget = -100;

struct Layer {
  at::Tensor w_ih;  // [G, I or H]
  at::Tensor w_hh;  // [G, H]
  at::Tensor bias;  // [G] b_ih + b_hh; undefined without bias
};

struct LinearMap {
  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out] or undefined
};

// The tensors as the ops receive them.
struct Arguments {
  at::Tensor input;                // [T,B,I]
  at::Tensor h0, c0;               // [L,R,H]
  at::TensorList weights;          // per layer w_ih, w_hh (, b_ih, b_hh)
  OptionalTensor decoder_weight;   // [V,H], an ensemble's [K,V,H]
  OptionalTensor decoder_bias;     // [V], an ensemble's [K,V]
  at::TensorList signal;           // of classifiers: weight [C,H], bias [C] of each
  at::TensorList step;             // sizes [L,S] or [L,S,H]; or what predicts them
  OptionalTensor gate;             // [1] recode where delta exceeds it
  OptionalTensor targets, labels;  // [T,B] int64
  OptionalTensor mask;             // [T,B] bool
  OptionalTensor lengths;          // [B] int64
  OptionalTensor seed;             // [1] int64
};

enum class Role {
  kForward,
  kBackward,  // of a forward pass that has looked at the values already
  kReader     // word by word: predictions are wanted, whatever the signal
};

// Half precision is a matter of products: all else is computed in float, widened here.
at::Tensor widen(const at::Tensor& t);

struct Problem {
  Spec spec;
  SignalFacts signal;
  Role role;
  int64_t T, B, R, I, H, L, V;
  at::ScalarType io_type;     // of input and output
  at::ScalarType state_type;  // of h_n and c_n
  Precision precision;        // of products

  at::Tensor input;   // [T,R,I] under its mask, where there is one
  at::Tensor h0, c0;  // [L,R,H]
  std::vector<Layer> layers;
  std::vector<LinearMap> decoders;     // one, or an ensemble's K, or none
  bool ensemble = false;               // they are an ensemble's
  std::vector<LinearMap> classifiers;  // [C,H], C >= 2
  at::Tensor step_sizes;  // [L,S] of the accumulation type; undefined: they are predicted, by
  std::vector<std::vector<LinearMap>> step_network;  // [L*S]
  at::Tensor unit_sizes;  // [L,S,H] sizes of single units, step_sizes are then 1; else undefined
  at::Tensor gate;        // [1] or undefined
  at::Tensor targets;     // [T,B] int64 or undefined; -100 behind the end and where ignored
  at::Tensor labels;      // [T,B] likewise, of classifiers
  at::Tensor counted;     // [T,B] bool or undefined: has a signal
  at::Tensor live;        // [T,R] uint8 or undefined: inside its sequence
  at::Tensor active;      // [T,R] uint8 or undefined: to be recoded
  at::Tensor seed;        // [1] int64 or undefined
  at::Tensor host_seed;   // the same where the host may read it; else undefined

  // ---- what follows from spec and signal

  bool recodes() const { return signal.exists && spec.states() > 0; }
  bool recodes_h() const { return recodes() && spec.recode_h; }
  bool recodes_c() const { return recodes() && spec.recode_c; }
  // The backward pass asks for the signal only where it differentiates its gradient.
  bool needs_signal() const { return recodes() && (role != Role::kBackward || spec.exact); }
  bool decodes() const {
    return spec.loss || role == Role::kReader || (needs_signal() && signal.decodes());
  }
  // The recoding gradient is a multiple of the loss's: they share their GEMM with the decoder.
  bool loss_shares_gradient() const {
    return spec.loss && recodes() && signal.reads_target && !spec.argmax;
  }
  // The backward pass makes these logits again, for their second derivatives: then for the loss,
  // too.
  bool loss_waits_for_backward() const { return spec.exact && loss_shares_gradient(); }
  // The recoding gradient itself is differentiated, through the layers that it went down.
  bool differentiates_gradient() const { return spec.exact && recodes() && signal.decodes(); }
  // Signals that see no label predict from the recoded state ("re-decoding").
  bool output_is_recoded() const { return recodes_h() && !signal.sees_labels(); }

  double layer_p() const { return signal.own_states ? spec.sample_p : spec.dropout; }
  double output_p() const { return signal.own_states ? spec.sample_p : spec.output_dropout; }
  int64_t samples_per_instance() const { return R / B; }
  int64_t index_of(bool of_c) const { return of_c && spec.recode_h ? 1 : 0; }  // among S

  const at::TensorOptions storage() const { return input.options(); }
  const at::TensorOptions accum() const { return h0.options(); }
  at::Device device() const { return input.device(); }

  // The one decoder that an ensemble is which predicts with mean logits.
  LinearMap mean_decoder() const;

  // ---- masks

  Dropout dropout_of(uint32_t stream, double p) const {
    return make_dropout(seed.defined() ? seed.const_data_ptr<int64_t>() : nullptr, stream, p);
  }
  // Of the connection that leads upwards from `layer`.
  Dropout dropout_above(int64_t layer) const {
    return layer == L - 1 ? dropout_of(kOutputStream, output_p())
                          : dropout_of(kLayerStream + layer, layer_p());
  }
  // Between the top state and what the signal sees.
  Dropout signal_dropout() const {
    return sees_output_dropout() ? dropout_above(L - 1) : Dropout{};
  }
  bool sees_output_dropout() const { return signal.decodes() && !signal.masks_top_state; }
  Dropout sample_dropout() const { return dropout_of(kSampleStream, spec.sample_p); }
  // The time that masks between layers and above them are drawn at.
  uint32_t mask_time(int64_t t) const {
    return signal.own_states || spec.held_dropout ? 0 : static_cast<uint32_t>(spec.time + t);
  }
  // What a held mask multiplies with, [R,units] of the accumulation type; undefined without.
  at::Tensor held_mask(uint32_t stream, int64_t units) const;
  at::Tensor input_mask() const { return held_mask(kInputStream, I); }
  at::Tensor recurrent_mask(int64_t layer) const { return held_mask(kRecurrentStream + layer, H); }
};

// What products of tensors of this type are rounded to.
Precision precision_of(const Spec& spec, at::ScalarType io_type);

// Checks everything; raises ValueError or TypeError that name the argument. A backward pass does
// not look at values again.
Problem make_problem(const Arguments& arguments, const Spec& spec, Role role);

void check_tensor(const char* name, const at::Tensor& t, at::IntArrayRef shape, const char* dims,
                  const at::Tensor& like);
void check_targets_in_range(const char* name, const at::Tensor& targets, int64_t vocab);

}  // namespace fused_recoder
