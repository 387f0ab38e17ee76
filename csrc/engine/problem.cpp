#include "problem.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <string>

#include "../cell/lstm.h"
#include "../steps/family.h"
#include "context.h"

namespace fused_recoder {
namespace {

using at::IntArrayRef;

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

void check_tensor(const char* name, const at::Tensor& t, IntArrayRef shape, const char* dims,
                  const at::Tensor& like) {
  TORCH_CHECK_VALUE(t.sizes() == shape, name, " must have shape ", dims, " = ", shape, ", got ",
                    t.sizes());
  TORCH_CHECK_VALUE(t.device() == like.device(), name, " must be on ", like.device(),
                    " like input, got ", t.device());
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, name, " must be a dense tensor, got layout ",
                    t.layout());
}

at::Tensor widen(const at::Tensor& t) {
  const bool half = t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
  return (half ? t.to(at::kFloat) : t).contiguous();
}

void check_targets_in_range(const char* name, const at::Tensor& targets, int64_t vocab) {
  if (!host_reads(targets.device())) {
    const at::Tensor valid = ((targets >= 0) & (targets < vocab)) | (targets == kIgnoreTarget);
    at::_assert_async(valid.all(), std::string(name) + " out of range");
    return;
  }
  const at::Tensor flat = targets.reshape({-1}).contiguous();  // [N]
  const int64_t* data = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    TORCH_CHECK_VALUE(data[i] == kIgnoreTarget || (data[i] >= 0 && data[i] < vocab), name,
                      " must be in [0, ", vocab, ") or ", kIgnoreTarget, ", got ", data[i],
                      " at flat position ", i);
}

LinearMap Problem::mean_decoder() const {
  const double share = 1.0 / decoders.size();
  LinearMap mean{decoders[0].weight * share, {}};
  if (decoders[0].bias.defined()) mean.bias = decoders[0].bias * share;
  for (size_t k = 1; k < decoders.size(); ++k) {
    mean.weight.add_(decoders[k].weight, share);
    if (mean.bias.defined()) mean.bias.add_(decoders[k].bias, share);
  }
  return mean;
}

at::Tensor Problem::held_mask(uint32_t stream, int64_t units) const {
  if (!signal.own_states || spec.sample_p == 0) return {};
  const at::Tensor mask = at::empty({R, units}, input.options());
  const Launch launch = launch_on(input.device());
  const auto fill = [&](const auto& kernels, auto* data) {
    using A = std::remove_pointer_t<decltype(data)>;
    kernels.dropout_mask(launch,
                         DropoutMask<A>{R, units, dropout_of(stream, spec.sample_p), 0, 0, data});
  };
  if (mask.scalar_type() == at::kDouble)
    fill(kernels_for<double>(input.device()), mask.mutable_data_ptr<double>());
  else
    fill(kernels_for<float>(input.device()), mask.mutable_data_ptr<float>());
  return mask;
}

namespace {

void check_layers(const Arguments& a, Problem& s) {
  const auto per_layer = static_cast<int64_t>(a.weights.size()) / s.L;
  TORCH_CHECK_VALUE(
      (per_layer == 2 || per_layer == 4) && per_layer * s.L == int64_t(a.weights.size()),
      "weights must hold w_ih, w_hh (and b_ih, b_hh) for each of ", s.L, " layers, got ",
      a.weights.size(), " tensors");
  for (int64_t l = 0; l < s.L; ++l) {
    const at::Tensor* w = &a.weights[l * per_layer];
    const std::string suffix = "_l" + std::to_string(l);
    const int64_t in = l == 0 ? s.I : s.H;
    check_tensor(("weight_ih" + suffix).c_str(), w[0], {kGates * s.H, in}, "[4H, in]", a.input);
    check_tensor(("weight_hh" + suffix).c_str(), w[1], {kGates * s.H, s.H}, "[4H, H]", a.input);
    for (int64_t i = 0; i < per_layer; ++i) check_same_type("every weight", w[i], a.input);
    Layer layer{widen(w[0]), widen(w[1]), {}};
    if (per_layer == 4) {
      check_tensor(("bias_ih" + suffix).c_str(), w[2], {kGates * s.H}, "[4H]", a.input);
      check_tensor(("bias_hh" + suffix).c_str(), w[3], {kGates * s.H}, "[4H]", a.input);
      layer.bias = widen(w[2]) + widen(w[3]);
    }
    s.layers.push_back(layer);
  }
}

void check_decoders(const Arguments& a, Problem& s) {
  s.V = 0;
  if (!s.decodes()) return;
  TORCH_CHECK_VALUE(a.decoder_weight.has_value(),
                    "decoder_weight must be given with a signal or a loss");
  const at::Tensor& weight = *a.decoder_weight;
  const bool ensemble = weight.dim() == 3;
  TORCH_CHECK_VALUE(ensemble || !s.signal.needs_members,
                    "decoder_weight of an ensemble must have shape [K, V, H], got ",
                    weight.sizes());
  TORCH_CHECK_VALUE((weight.dim() == 2 || ensemble) && weight.size(-2) > 0,
                    "decoder_weight must have shape [V, H] or [K, V, H], got ", weight.sizes());
  const int64_t members = ensemble ? weight.size(0) : 1;
  TORCH_CHECK_VALUE(members > 0, "an ensemble must have members, got shape ", weight.sizes());
  TORCH_CHECK_VALUE(!s.signal.needs_members || members == s.spec.samples,
                    "samples must be the number of ensemble members, ", members, ", got ",
                    s.spec.samples);
  s.ensemble = ensemble;
  TORCH_CHECK_VALUE(!ensemble || s.signal.needs_members || s.signal.reads_labels || !s.recodes(),
                    "decoder_weight must have shape [V, H] for this signal, got ", weight.sizes());
  s.V = weight.size(-2);
  const int64_t with_members[] = {members, s.V, s.H};
  const at::IntArrayRef shape = at::IntArrayRef(with_members).slice(ensemble ? 0 : 1);
  check_tensor("decoder_weight", weight, shape, ensemble ? "[K, V, H]" : "[V, H]", a.input);
  check_same_type("decoder_weight", weight, a.input);
  if (a.decoder_bias.has_value()) {
    check_tensor("decoder_bias", *a.decoder_bias, shape.slice(0, shape.size() - 1),
                 ensemble ? "[K, V]" : "[V]", a.input);
    check_same_type("decoder_bias", *a.decoder_bias, a.input);
  }
  const at::Tensor weights = widen(weight).view({members, s.V, s.H});
  const at::Tensor biases =
      a.decoder_bias.has_value() ? widen(*a.decoder_bias).view({members, s.V}) : at::Tensor();
  for (int64_t k = 0; k < members; ++k)
    s.decoders.push_back({weights[k], biases.defined() ? biases[k] : at::Tensor()});
}

// [T,B] of int64, with -100 behind the end of each sequence.
at::Tensor check_tokens(const char* name, const at::Tensor& tokens, const at::Tensor& live,
                        const Problem& s, const at::Tensor& input) {
  check_tensor(name, tokens, {s.T, s.B}, "[T, B]", input);
  TORCH_CHECK_TYPE(tokens.scalar_type() == at::kLong, name, " must be int64, got ",
                   tokens.scalar_type());
  return (live.defined() ? at::where(live, tokens, kIgnoreTarget) : tokens).contiguous();
}

// [T,B] bool: inside its sequence.
at::Tensor check_lengths(const at::Tensor& lengths, const Problem& s, const at::Tensor& input) {
  check_tensor("lengths", lengths, {s.B}, "[B]", input);
  TORCH_CHECK_TYPE(lengths.scalar_type() == at::kLong, "lengths must be int64, got ",
                   lengths.scalar_type());
  if (s.role == Role::kBackward) {
    // known to be right
  } else if (!host_reads(lengths.device())) {
    at::_assert_async(((lengths >= 1) & (lengths <= s.T)).all(), "lengths must be in [1, T]");
  } else {
    const int64_t shortest = lengths.min().item<int64_t>();
    const int64_t longest = lengths.max().item<int64_t>();
    TORCH_CHECK_VALUE(shortest >= 1 && longest <= s.T, "lengths must be between 1 and T = ", s.T,
                      ", got ", shortest, " to ", longest);
  }
  const at::Tensor time = at::arange(s.T, lengths.options()).unsqueeze(1);  // [T,1]
  return time < lengths.unsqueeze(0);
}

at::Tensor check_mask(const at::Tensor& mask, const Problem& s, const at::Tensor& input) {
  check_tensor("recode_mask", mask, {s.T, s.B}, "[T, B]", input);
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool, "recode_mask must be bool, got ",
                   mask.scalar_type());
  return mask;
}

// Where there is something to recode, and what the tokens and labels are.
void check_positions(const Arguments& a, Problem& s) {
  at::Tensor live, active;  // [T,B] bool
  if (a.lengths.has_value()) s.counted = live = check_lengths(*a.lengths, s, a.input);
  if (a.mask.has_value()) active = check_mask(*a.mask, s, a.input);
  const auto only_where = [](at::Tensor& where, const at::Tensor& condition) {
    where = where.defined() ? where.logical_and(condition) : condition;
  };
  const auto only_labelled = [&](const at::Tensor& tokens) {
    only_where(s.counted, tokens != kIgnoreTarget);
    only_where(active, tokens != kIgnoreTarget);
  };
  const bool looks = s.role != Role::kBackward;
  TORCH_CHECK_VALUE(!s.spec.loss || a.targets.has_value(), "targets must be given for a loss");
  if (a.targets.has_value()) {
    s.targets = check_tokens("targets", *a.targets, live, s, a.input);
    if (s.V > 0 && looks) check_targets_in_range("targets", s.targets, s.V);
    if (!s.signal.reads_labels) only_labelled(s.targets);
  }
  if (s.signal.reads_labels && s.needs_signal()) {
    TORCH_CHECK_VALUE(a.labels.has_value(), "labels must be given for a classifier (",
                      kIgnoreTarget, " where there is none)");
    s.labels = check_tokens("labels", *a.labels, live, s, a.input);
    for (const LinearMap& classifier : s.classifiers)
      if (looks) check_targets_in_range("labels", s.labels, classifier.weight.size(0));
    only_labelled(s.labels);
  }
  const auto per_row = [&](const at::Tensor& where) {
    if (!where.defined()) return at::Tensor();
    return where.to(at::kByte).repeat({1, s.samples_per_instance()}).contiguous();
  };
  s.live = per_row(live);
  s.active = per_row(active);
}

void check_sizes(const Arguments& a, Problem& s) {
  const at::Tensor &input = a.input, &h0 = a.h0;
  TORCH_CHECK_VALUE(input.dim() == 3, "input must have shape [T, B, I], got ", input.sizes());
  TORCH_CHECK_TYPE(is_floating(input.scalar_type()),
                   "input must be float32, float64, float16 or bfloat16, got ",
                   input.scalar_type());
  s.T = input.size(0), s.B = input.size(1), s.I = input.size(2);
  TORCH_CHECK_VALUE(s.T > 0, "input must have at least one time step, got shape ", input.sizes());
  TORCH_CHECK_VALUE(s.B > 0, "input must have at least one batch row, got shape ", input.sizes());
  TORCH_CHECK_VALUE(s.I > 0, "input must have at least one feature, got shape ", input.sizes());
  TORCH_CHECK_VALUE(s.spec.samples >= 1 && s.spec.samples < (1 << 20),
                    "samples must be at least 1, got ", s.spec.samples);
  TORCH_CHECK_VALUE(s.spec.time >= 0, "time must not be negative, got ", s.spec.time);
  s.R = s.signal.own_states ? s.spec.samples * s.B : s.B;

  TORCH_CHECK_VALUE(h0.dim() == 3, "h0 must have shape [L, B, H], got ", h0.sizes());
  s.L = h0.size(0), s.H = h0.size(2);
  TORCH_CHECK_VALUE(s.L > 0 && s.H > 0, "h0 must have layers and hidden units, got shape ",
                    h0.sizes());
  const char* dims = s.signal.own_states ? "[L, K*B, H]" : "[L, B, H]";
  check_tensor("h0", h0, {s.L, s.R, s.H}, dims, input);
  check_tensor("c0", a.c0, {s.L, s.R, s.H}, dims, input);
  check_same_type("c0", a.c0, h0);
  s.io_type = input.scalar_type();
  s.state_type = h0.scalar_type();
  const at::ScalarType compute = accumulate_type(s.io_type);
  TORCH_CHECK_TYPE(s.state_type == s.io_type || s.state_type == compute, "h0 must have dtype ",
                   s.io_type, " or ", compute, ", got ", s.state_type);
}

void check_randomness(const Arguments& a, Problem& s) {
  const Spec& spec = s.spec;
  check_probability("dropout", spec.dropout);
  check_probability("output_dropout", spec.output_dropout);
  check_probability("p", spec.sample_p);
  TORCH_CHECK_VALUE(spec.probability > 0 && spec.probability <= 1,
                    "probability must be in (0, 1], got ", spec.probability);
  TORCH_CHECK_VALUE(!s.signal.own_states || (spec.dropout == 0 && spec.output_dropout == 0),
                    "dropout and output_dropout must be 0 with a variational signal: it has masks "
                    "of its own");
  const bool random = spec.dropout > 0 || spec.output_dropout > 0 || spec.sample_p > 0 ||
                      (spec.probability < 1 && s.role == Role::kReader);
  TORCH_CHECK_VALUE(!random || a.seed.has_value(), "seed must be given where there is dropout");
  if (!a.seed.has_value()) return;
  TORCH_CHECK_TYPE(a.seed->scalar_type() == at::kLong, "seed must be int64, got ",
                   a.seed->scalar_type());
  // One that the host drew tells it the masks; the kernels read it from their device.
  const bool from_host = a.seed->is_cpu() && !a.input.is_cpu();
  check_tensor("seed", *a.seed, {1}, "[1]", from_host ? *a.seed : a.input);
  if (host_reads(a.seed->device())) s.host_seed = a.seed->contiguous();
  s.seed = a.seed->to(a.input.device()).contiguous();
}

// Every sample reads the input, each under a mask of its own.
void repeat_input(Problem& s) {
  const int64_t K = s.spec.samples;
  s.input = s.input.unsqueeze(1).expand({s.T, K, s.B, s.I});
  const at::Tensor mask = s.input_mask();
  s.input = (mask.defined() ? s.input * mask.view({K, s.B, s.I}) : s.input)
                .reshape({s.T, s.R, s.I})
                .contiguous();
}

}  // namespace

Problem make_problem(const Arguments& a, const Spec& spec, Role role) {
  Problem s;
  s.spec = spec;
  s.role = role;
  const SignalFamily& signal = signal_family(spec.signal);
  const StepFamily& step = step_family(spec.step);
  s.signal = signal.facts;
  check_sizes(a, s);
  check_randomness(a, s);
  TORCH_CHECK_VALUE(!s.signal.exists || spec.states() > 0, "states must name h, c or both");
  const at::ScalarType compute = accumulate_type(s.io_type);
  s.input = widen(a.input);
  s.h0 = widen(a.h0.to(compute));
  s.c0 = widen(a.c0.to(compute));
  check_layers(a, s);
  check_decoders(a, s);
  if (s.needs_signal() && signal.check != nullptr) signal.check(a, s);
  if (s.recodes()) step.check(a, s);
  if (s.recodes() && a.gate.has_value()) {
    check_tensor("gate", *a.gate, {1}, "[1]", a.input);
    s.gate = a.gate->to(compute);
  }
  check_positions(a, s);
  if (s.signal.own_states) repeat_input(s);
  return s;
}

}  // namespace fused_recoder
