#include "sequence.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include <string>

#include "context.h"

namespace fused_recoder {
namespace {

using at::IntArrayRef;

void check_tensor(const char* name, const at::Tensor& t, IntArrayRef shape, const char* dims,
                  const at::Tensor& like) {
  TORCH_CHECK_VALUE(t.sizes() == shape, name, " must have shape ", dims, " = ", shape, ", got ",
                    t.sizes());
  TORCH_CHECK_VALUE(t.device() == like.device(), name, " must be on ", like.device(),
                    " like input, got ", t.device());
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, name, " must be a dense tensor, got layout ",
                    t.layout());
}

void check_same_type(const char* name, const at::Tensor& t, const at::Tensor& like) {
  TORCH_CHECK_TYPE(t.scalar_type() == like.scalar_type(), name, " must have dtype ",
                   like.scalar_type(), " like input, got ", t.scalar_type());
}

void check_probability(const char* name, double p) {
  TORCH_CHECK_VALUE(p >= 0 && p < 1, name, " must be in [0, 1), got ", p);
}

bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

}  // namespace

SignalKind parse_signal(c10::string_view name) {
  if (name == "none") return SignalKind::kNone;
  if (name == "surprisal") return SignalKind::kSurprisal;
  if (name == "nll") return SignalKind::kNll;
  if (name == "entropy") return SignalKind::kEntropy;
  TORCH_CHECK_VALUE(false, "signal must be none, surprisal, nll or entropy, got '", name, "'");
}

at::Tensor widen(const at::Tensor& t) {
  const bool half = t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
  return (half && t.is_cpu() ? t.to(at::kFloat) : t).contiguous();
}

void check_targets_in_range(const at::Tensor& targets, int64_t vocab) {
  if (!targets.is_cpu()) return;  // on a GPU the kernel asserts: looking here would synchronise
  const at::Tensor flat = targets.reshape({-1});  // [N]
  const int64_t* data = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    TORCH_CHECK_VALUE(data[i] == kIgnoreTarget || (data[i] >= 0 && data[i] < vocab),
                      "targets must be in [0, ", vocab, ") or ", kIgnoreTarget, ", got ", data[i],
                      " at flat position ", i);
}

Sequence make_sequence(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                       at::TensorList weights, const OptionalTensor& decoder_weight,
                       const OptionalTensor& decoder_bias, const at::Tensor& step,
                       const OptionalTensor& targets, const OptionalTensor& mask,
                       const OptionalTensor& lengths, const OptionalTensor& seed,
                       const Options& options) {
  Sequence s;
  s.options = options;
  TORCH_CHECK_VALUE(input.dim() == 3, "input must have shape [T, B, I], got ", input.sizes());
  TORCH_CHECK_TYPE(is_floating(input.scalar_type()),
                   "input must be float32, float64, float16 or bfloat16, got ",
                   input.scalar_type());
  s.T = input.size(0), s.B = input.size(1), s.I = input.size(2);
  TORCH_CHECK_VALUE(s.T > 0, "input must have at least one time step, got shape ", input.sizes());
  TORCH_CHECK_VALUE(s.B > 0, "input must have at least one batch row, got shape ", input.sizes());
  TORCH_CHECK_VALUE(s.I > 0, "input must have at least one feature, got shape ", input.sizes());

  TORCH_CHECK_VALUE(h0.dim() == 3, "h0 must have shape [L, B, H], got ", h0.sizes());
  s.L = h0.size(0), s.H = h0.size(2);
  TORCH_CHECK_VALUE(s.L > 0 && s.H > 0, "h0 must have layers and hidden units, got shape ",
                    h0.sizes());
  check_tensor("h0", h0, {s.L, s.B, s.H}, "[L, B, H]", input);
  check_tensor("c0", c0, {s.L, s.B, s.H}, "[L, B, H]", input);
  check_same_type("c0", c0, h0);
  s.io_type = input.scalar_type();
  s.state_type = h0.scalar_type();
  const at::ScalarType compute = accumulate_type(s.io_type);
  TORCH_CHECK_TYPE(s.state_type == s.io_type || s.state_type == compute, "h0 must have dtype ",
                   s.io_type, " or ", compute, ", got ", s.state_type);

  const auto per_layer = static_cast<int64_t>(weights.size()) / s.L;
  TORCH_CHECK_VALUE(
      (per_layer == 2 || per_layer == 4) && per_layer * s.L == int64_t(weights.size()),
      "weights must hold w_ih, w_hh (and b_ih, b_hh) for each of ", s.L, " layers, got ",
      weights.size(), " tensors");
  for (int64_t l = 0; l < s.L; ++l) {
    const at::Tensor* w = &weights[l * per_layer];
    const std::string suffix = "_l" + std::to_string(l);
    const int64_t in = l == 0 ? s.I : s.H;
    check_tensor(("weight_ih" + suffix).c_str(), w[0], {4 * s.H, in}, "[4H, in]", input);
    check_tensor(("weight_hh" + suffix).c_str(), w[1], {4 * s.H, s.H}, "[4H, H]", input);
    for (int64_t i = 0; i < per_layer; ++i) check_same_type("every weight", w[i], input);
    Layer layer{widen(w[0]), widen(w[1]), {}};
    if (per_layer == 4) {
      check_tensor(("bias_ih" + suffix).c_str(), w[2], {4 * s.H}, "[4H]", input);
      check_tensor(("bias_hh" + suffix).c_str(), w[3], {4 * s.H}, "[4H]", input);
      layer.bias = widen(w[2]) + widen(w[3]);
    }
    s.layers.push_back(layer);
  }

  check_probability("dropout", options.dropout);
  check_probability("output_dropout", options.output_dropout);
  const bool random = options.dropout > 0 || options.output_dropout > 0;
  TORCH_CHECK_VALUE(!random || seed.has_value(), "seed must be given where there is dropout");
  if (seed.has_value()) {
    check_tensor("seed", *seed, {1}, "[1]", input);
    TORCH_CHECK_TYPE(seed->scalar_type() == at::kLong, "seed must be int64, got ",
                     seed->scalar_type());
    s.seed = seed->contiguous();
  }

  if (lengths.has_value()) {
    check_tensor("lengths", *lengths, {s.B}, "[B]", input);
    TORCH_CHECK_TYPE(lengths->scalar_type() == at::kLong, "lengths must be int64, got ",
                     lengths->scalar_type());
    if (lengths->is_cpu()) {
      const int64_t shortest = lengths->min().item<int64_t>();
      const int64_t longest = lengths->max().item<int64_t>();
      TORCH_CHECK_VALUE(shortest >= 1 && longest <= s.T, "lengths must be between 1 and T = ", s.T,
                        ", got ", shortest, " to ", longest);
    }
    const at::Tensor time = at::arange(s.T, lengths->options()).unsqueeze(1);  // [T,1]
    s.live = (time < lengths->unsqueeze(0)).to(at::kByte);
  }

  s.V = 0;
  if (options.signal != SignalKind::kNone)
    TORCH_CHECK_VALUE(options.states() > 0, "states must name h, c or both");
  if (options.decodes()) {
    TORCH_CHECK_VALUE(decoder_weight.has_value(),
                      "decoder_weight must be given with a signal or a loss");
    TORCH_CHECK_VALUE(decoder_weight->dim() == 2 && decoder_weight->size(0) > 0,
                      "decoder_weight must have shape [V, H], got ", decoder_weight->sizes());
    s.V = decoder_weight->size(0);
    check_tensor("decoder_weight", *decoder_weight, {s.V, s.H}, "[V, H]", input);
    check_same_type("decoder_weight", *decoder_weight, input);
    s.decoder_weight = widen(*decoder_weight);
    if (decoder_bias.has_value()) {
      check_tensor("decoder_bias", *decoder_bias, {s.V}, "[V]", input);
      check_same_type("decoder_bias", *decoder_bias, input);
      s.decoder_bias = widen(*decoder_bias);
    }
  }
  if (options.recodes()) {
    check_tensor("step", step, {s.L, options.states()}, "[L, S]", input);
    TORCH_CHECK_TYPE(is_floating(step.scalar_type()), "step must be floating point, got ",
                     step.scalar_type());
    s.step = step.to(compute).contiguous();
    if (s.step.is_cpu())
      TORCH_CHECK_VALUE(at::isfinite(s.step).all().item<bool>(), "step must be finite, got ",
                        s.step);
  }

  if (mask.has_value()) {
    check_tensor("recode_mask", *mask, {s.T, s.B}, "[T, B]", input);
    TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool, "recode_mask must be bool, got ",
                     mask->scalar_type());
    s.active = mask->to(at::kByte).contiguous();
  }
  TORCH_CHECK_VALUE(!options.loss || targets.has_value(), "targets must be given for a loss");
  if (targets.has_value()) {
    check_tensor("targets", *targets, {s.T, s.B}, "[T, B]", input);
    TORCH_CHECK_TYPE(targets->scalar_type() == at::kLong, "targets must be int64, got ",
                     targets->scalar_type());
    s.targets =
        (s.live.defined() ? at::where(s.live.to(at::kBool), *targets, kIgnoreTarget) : *targets)
            .contiguous();
    if (s.V > 0) check_targets_in_range(s.targets, s.V);
    const at::Tensor counted = (s.targets != kIgnoreTarget).to(at::kByte);
    s.active = s.active.defined() ? s.active * counted : counted;
  }

  s.input = widen(input);
  s.h0 = widen(h0.to(compute));
  s.c0 = widen(c0.to(compute));
  return s;
}

}  // namespace fused_recoder
