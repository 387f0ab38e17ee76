// The arguments of a recoded sequence as the ops receive them, checked once, in one place.
// Used by everything in this folder.
//
// Dimensions: T time, B batch instances, I input, H hidden, L layers, V vocabulary, S recoded
// states ("h" before "c"), K samples or ensemble members, R rows: B, or K * B (row k * B + b) where
// every sample has states of its own.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "../kernels/math.h"

namespace fused_recoder {

using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kIgnoreTarget = -100;

// Where the K predictions of a mixture come from.
enum class MixtureKind {
  kUnitMasks,    // MC Dropout, a mask of H units per instance, step and sample
  kSharedMasks,  // the same mask for the whole batch
  kWeightMasks,  // a mask of V x H weights per step and sample
  kEnsemble,     // K decoders
  kVariational   // K recurrent states under masks held for the whole sequence
};

enum class StepKind { kGiven, kPredicted, kBacktracking };

// What the caller chose; the ops' arguments that are not tensors.
struct Options {
  SignalKind signal = SignalKind::kNone;
  MixtureKind mixture = MixtureKind::kUnitMasks;
  bool argmax = false;  // gold signals: recode towards the most probable token
  int64_t samples = 1;  // K
  double sample_p = 0;  // dropout of the samples
  bool mean_logits =
      false;  // an ensemble predicts with the mean of its members' logits: one decoder
  // Of each classifier: 2 * layer + (1 if it reads c).
  std::vector<int64_t> classifier_states;
  bool recode_h = true, recode_c = true;
  double dropout = 0;         // between layers
  double output_dropout = 0;  // between the top layer and the decoder
  StepKind step = StepKind::kGiven;
  double shrink = 0.5;  // backtracking: the factor between trials
  int64_t trials = 1;
  int64_t time = 0;  // of the first step, for the masks
  bool loss = false;
  bool reads = false;     // word by word: predictions are wanted, whatever the signal
  bool exact = false;     // the recoding gradient is differentiated, too
  bool backward = false;  // the backward pass: without `exact` the signal is not needed any more

  int64_t states() const { return int64_t(recode_h) + int64_t(recode_c); }
  bool recodes() const { return signal != SignalKind::kNone && states() > 0; }
  bool is_mixture(MixtureKind kind) const {
    return signal == SignalKind::kMixture && mixture == kind;
  }
  bool variational() const { return is_mixture(MixtureKind::kVariational); }
  bool ensemble() const { return is_mixture(MixtureKind::kEnsemble); }
  bool mc_dropout() const {
    return signal == SignalKind::kMixture && !variational() && !ensemble();
  }
  bool classifies() const { return signal == SignalKind::kClassifier; }
  // The K predictions of a mixture are needed one by one.
  bool mixes() const { return signal == SignalKind::kMixture && !(ensemble() && mean_logits); }
  bool decodes() const { return loss || reads || (recodes() && !classifies() && needs_signal()); }
  bool needs_signal() const { return !backward || exact; }
  bool sees_labels() const { return reads_target(signal) || classifies(); }
  // The recoding gradient is a multiple of the loss's: they share their GEMM with the decoder.
  bool loss_shares_gradient() const { return loss && recodes() && reads_target(signal) && !argmax; }
  // The backward pass makes these logits again, for their second derivatives: then for the loss,
  // too.
  bool loss_waits_for_backward() const { return exact && loss_shares_gradient(); }
  // Signals that see labels predict from the unrecoded state (none may leak), the others from the
  // recoded one.
  bool output_is_recoded() const { return recodes() && recode_h && !sees_labels(); }
  // Masks of MC Dropout act on the undropped top state; other signals see what is predicted from.
  bool signal_sees_output_dropout() const { return !mc_dropout() && !classifies(); }
  double layer_p() const { return variational() ? sample_p : dropout; }
  double output_p() const { return variational() ? sample_p : output_dropout; }
};

// Sets signal and mixture: "none", "surprisal", "nll", "entropy", "mc_unit", "mc_shared",
// "mc_weight", "ensemble", "variational", "classifier".
void parse_signal(c10::string_view name, Options& options);
// "given", "predicted", "backtracking"
StepKind parse_step(c10::string_view name);

struct Layer {
  at::Tensor w_ih;  // [4H, I or H]
  at::Tensor w_hh;  // [4H, H]
  at::Tensor bias;  // [4H] b_ih + b_hh; undefined without bias
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
  at::TensorList classifiers;      // weight [C,H], bias [C] of each
  at::Tensor step;                 // [L,S]
  at::TensorList step_network;     // per (layer, state) weight and bias of every linear map
  OptionalTensor gate;             // [1] recode where delta exceeds it
  OptionalTensor targets, labels;  // [T,B] int64
  OptionalTensor mask;             // [T,B] bool
  OptionalTensor lengths;          // [B] int64
  OptionalTensor seed;             // [1] int64
};

// Half precision is computed in float: widened here, once per sequence.
at::Tensor widen(const at::Tensor& t);

struct Sequence {
  Options options;
  int64_t T, B, R, I, H, L, V;
  at::ScalarType io_type;     // of input and output
  at::ScalarType state_type;  // of h_n and c_n

  at::Tensor input;   // [T,R,I] under its mask, where there is one
  at::Tensor h0, c0;  // [L,R,H]
  std::vector<Layer> layers;
  std::vector<LinearMap> decoders;                   // one, or an ensemble's K, or none
  bool ensemble = false;                             // they are an ensemble's
  std::vector<LinearMap> classifiers;                // [C,H], C >= 2
  at::Tensor step;                                   // [L,S] of the accumulation type
  std::vector<std::vector<LinearMap>> step_network;  // [L*S]
  at::Tensor gate;                                   // [1] or undefined
  at::Tensor targets;    // [T,B] int64 or undefined; -100 behind the end and where ignored
  at::Tensor labels;     // [T,B] likewise, of classifiers
  at::Tensor counted;    // [T,B] bool or undefined: has a signal
  at::Tensor live;       // [T,R] uint8 or undefined: inside its sequence
  at::Tensor active;     // [T,R] uint8 or undefined: to be recoded
  at::Tensor seed;       // [1] int64 or undefined
  at::Tensor host_seed;  // the same where the host may read it; else undefined

  // The one decoder that an ensemble is which predicts with mean logits.
  LinearMap mean_decoder() const;

  Dropout dropout_of(uint32_t stream, double p) const {
    return make_dropout(seed.defined() ? seed.const_data_ptr<int64_t>() : nullptr, stream, p);
  }
  // Of the connection that leads upwards from `layer`.
  Dropout dropout_above(int64_t layer) const {
    return layer == L - 1 ? dropout_of(kOutputStream, options.output_p())
                          : dropout_of(kLayerStream + layer, options.layer_p());
  }
  // Between the top state and what the signal sees.
  Dropout signal_dropout() const {
    return options.signal_sees_output_dropout() ? dropout_above(L - 1) : Dropout{};
  }
  Dropout sample_dropout() const { return dropout_of(kSampleStream, options.sample_p); }
  // The time that masks between layers and above them are drawn at: variational ones are held.
  uint32_t mask_time(int64_t t) const {
    return options.variational() ? 0 : static_cast<uint32_t>(options.time + t);
  }
  // What a held mask multiplies with, [R,units] of the accumulation type; undefined without.
  at::Tensor held_mask(uint32_t stream, int64_t units) const;
  at::Tensor input_mask() const { return held_mask(kInputStream, I); }
  at::Tensor recurrent_mask(int64_t layer) const { return held_mask(kRecurrentStream + layer, H); }
};

// Checks everything; raises ValueError or TypeError that name the argument.
Sequence make_sequence(const Arguments& arguments, const Options& options);

void check_targets_in_range(const char* name, const at::Tensor& targets, int64_t vocab);

}  // namespace fused_recoder
