// Decoder-level ops for any model: the signal of given hidden states, its gradient in them, and
// the backward pass of both. Works in chunks of rows: [N,V] is never held.
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "../engine/context.h"
#include "ops.h"

namespace fused_recoder {
namespace {

struct Checked {
  RowSignal signal;
  int64_t N, H, V;
  at::ScalarType io_type;
  at::Tensor hidden, weight, bias, targets;  // [N,H], [V,H], [V] or undefined, [N] or undefined
};

Checked check(const at::Tensor& hidden, const at::Tensor& weight, const OptionalTensor& bias,
              const OptionalTensor& targets, const Spec& spec) {
  Checked a;
  const SignalFacts& signal = signal_family(spec.signal).facts;
  TORCH_CHECK_VALUE(signal.row_kind.has_value() && !signal.needs_members,
                    "signal must be one of a single prediction, got '", spec.signal, "'");
  a.signal = signal.row(spec);
  TORCH_CHECK_VALUE(hidden.dim() == 2, "hidden must have shape [N, H], got ", hidden.sizes());
  TORCH_CHECK_VALUE(hidden.numel() > 0, "hidden must not be empty, got shape ", hidden.sizes());
  a.io_type = hidden.scalar_type();
  TORCH_CHECK_TYPE(a.io_type == at::kFloat || a.io_type == at::kDouble || a.io_type == at::kHalf ||
                       a.io_type == at::kBFloat16,
                   "hidden must be float32, float64, float16 or bfloat16, got ", a.io_type);
  a.N = hidden.size(0), a.H = hidden.size(1);
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == a.H && weight.size(0) > 0,
                    "weight must have shape [V, H] with H = ", a.H, ", got ", weight.sizes());
  a.V = weight.size(0);
  const auto check_like_hidden = [&](const char* name, const at::Tensor& t) {
    TORCH_CHECK_VALUE(t.device() == hidden.device(), name, " must be on ", hidden.device(),
                      " like hidden, got ", t.device());
    TORCH_CHECK_TYPE(t.scalar_type() == a.io_type, name, " must have dtype ", a.io_type,
                     " like hidden, got ", t.scalar_type());
  };
  check_like_hidden("weight", weight);
  if (bias.has_value()) {
    check_like_hidden("bias", *bias);
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == a.V, "bias must have shape [V] = [", a.V,
                      "], got ", bias->sizes());
    a.bias = widen(*bias);
  }
  if (targets.has_value()) {
    TORCH_CHECK_VALUE(targets->dim() == 1 && targets->size(0) == a.N,
                      "targets must have shape [N] = [", a.N, "], got ", targets->sizes());
    TORCH_CHECK_VALUE(targets->device() == hidden.device(), "targets must be on ", hidden.device(),
                      " like hidden, got ", targets->device());
    TORCH_CHECK_TYPE(targets->scalar_type() == at::kLong, "targets must be int64, got ",
                     targets->scalar_type());
    a.targets = targets->contiguous();
    check_targets_in_range("targets", a.targets, a.V);
  }
  a.hidden = widen(hidden);
  a.weight = widen(weight);
  return a;
}

int64_t rows_per_chunk(const Checked& a) {
  return std::clamp<int64_t>((int64_t(1) << 22) / a.V, 1, a.N);
}

template <typename S>
std::tuple<at::Tensor, at::Tensor> run(const Checked& a) {
  using A = typename AccumulateIn<S>::type;
  const Kernels<S>& kernels = kernels_for<S>(a.hidden.device());
  const Launch launch = launch_on(a.hidden.device());
  const at::TensorOptions accum = a.hidden.options().dtype(accumulate_type(a.io_type));
  const Buffer<A> delta({a.N}, accum), scale({a.N}, accum);
  const at::Tensor grad = at::empty({a.N, a.H}, accum);
  const int64_t chunk = rows_per_chunk(a);
  const ConstantMatrix<S> decode(a.weight, true, (a.N + chunk - 1) / chunk, chunk);
  const ConstantMatrix<S> decode_back(a.weight, false, (a.N + chunk - 1) / chunk, chunk);
  const A* bias = a.bias.defined() ? a.bias.const_data_ptr<A>() : nullptr;
  const at::Tensor logits = at::empty({chunk, a.V}, accum);
  const Buffer<uint8_t> scratch = softmax_scratch(kernels, chunk, a.V, accum.device());
  for (int64_t start = 0; start < a.N; start += chunk) {
    const int64_t rows = std::min(chunk, a.N - start);
    const at::Tensor part = logits.narrow(0, 0, rows);
    decode.multiply(rows, a.hidden.const_data_ptr<S>() + start * a.H, part.mutable_data_ptr<A>(),
                    bias);
    SoftmaxSignal<S> p{};
    p.rows = rows;
    p.vocab = a.V;
    p.signal = a.signal;
    p.logits = part.mutable_data_ptr<A>();
    p.targets = a.targets.defined() ? a.targets.const_data_ptr<int64_t>() + start : nullptr;
    p.direction = part.mutable_data_ptr<S>();
    p.delta = delta(start);
    p.scale = scale(start);
    p.scratch = rows == chunk ? scratch() : nullptr;  // fewer rows may be split into more blocks
    kernels.softmax_signal(launch, p);
    decode_back.multiply(rows, part.const_data_ptr<S>(), grad.mutable_data_ptr<A>() + start * a.H);
  }
  grad.mul_(scale.tensor().unsqueeze(1));
  check_launches(accum.device());
  return {delta.tensor(), grad.to(a.io_type)};
}

template <typename S>
std::tuple<at::Tensor, at::Tensor, at::Tensor> run_backward(const Checked& a,
                                                            const at::Tensor& delta_bar,
                                                            const at::Tensor& grad_bar) {
  using A = typename AccumulateIn<S>::type;
  const Kernels<S>& kernels = kernels_for<S>(a.hidden.device());
  const Launch launch = launch_on(a.hidden.device());
  const at::TensorOptions accum = a.hidden.options().dtype(accumulate_type(a.io_type));
  const at::Tensor v = grad_bar.to(accum).contiguous();  // [N,H]
  const Buffer<A> d(delta_bar.to(accum).contiguous());   // [N]
  const at::Tensor hidden_bar = at::empty({a.N, a.H}, accum);
  const at::Tensor weight_bar = at::zeros({a.V, a.H}, accum);
  const at::Tensor bias_bar = at::zeros({a.V}, accum);
  const int64_t chunk = rows_per_chunk(a);
  const ConstantMatrix<S> decode(a.weight, true, (a.N + chunk - 1) / chunk, chunk);
  const ConstantMatrix<S> decode_back(a.weight, false, (a.N + chunk - 1) / chunk, chunk);
  const A* bias = a.bias.defined() ? a.bias.const_data_ptr<A>() : nullptr;
  const at::Tensor logits = at::empty({chunk, a.V}, accum), bars = at::empty({chunk, a.V}, accum);
  const Buffer<uint8_t> scratch = softmax_scratch(kernels, chunk, a.V, accum.device());
  for (int64_t start = 0; start < a.N; start += chunk) {
    const int64_t rows = std::min(chunk, a.N - start);
    const at::Tensor l = logits.narrow(0, 0, rows), bar = bars.narrow(0, 0, rows);
    const at::Tensor h = a.hidden.narrow(0, start, rows), v_rows = v.narrow(0, start, rows);
    decode.multiply(rows, h.const_data_ptr<S>(), l.mutable_data_ptr<A>(), bias);
    decode.multiply(rows, v_rows.const_data_ptr<S>(), bar.mutable_data_ptr<A>());
    SoftmaxSignalBackward<S> p{};
    p.rows = rows;
    p.vocab = a.V;
    p.signal = a.signal;
    p.logits = l.mutable_data_ptr<A>();
    p.targets = a.targets.defined() ? a.targets.const_data_ptr<int64_t>() + start : nullptr;
    p.delta_bar = d(start);
    p.u_bar = bar.mutable_data_ptr<A>();
    p.u = l.mutable_data_ptr<A>();
    p.scratch = rows == chunk ? scratch() : nullptr;
    kernels.softmax_signal_backward(launch, p);
    decode_back.multiply(rows, bar.const_data_ptr<S>(),
                         hidden_bar.mutable_data_ptr<A>() + start * a.H);
    add_outer<S>(weight_bar, bar, h);
    add_outer<S>(weight_bar, l, v_rows);  // l holds u
    bias_bar.add_(bar.sum(0));
  }
  check_launches(accum.device());
  return {hidden_bar.to(a.io_type), weight_bar.to(a.io_type), bias_bar.to(a.io_type)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> signal_gradient(const at::Tensor& hidden,
                                                   const at::Tensor& weight,
                                                   const OptionalTensor& bias,
                                                   const OptionalTensor& targets,
                                                   c10::string_view spec) {
  const c10::DeviceGuard guard(hidden.device());
  const Checked a = check(hidden, weight, bias, targets, parse_spec(spec));
  return a.hidden.scalar_type() == at::kDouble ? run<double>(a) : run<float>(a);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> signal_gradient_backward(
    const at::Tensor& delta_bar, const at::Tensor& grad_bar, const at::Tensor& hidden,
    const at::Tensor& weight, const OptionalTensor& bias, const OptionalTensor& targets,
    c10::string_view spec) {
  const c10::DeviceGuard guard(hidden.device());
  const Checked a = check(hidden, weight, bias, targets, parse_spec(spec));
  TORCH_CHECK_VALUE(delta_bar.sizes() == at::IntArrayRef({a.N}),
                    "delta_bar must have shape [N], got ", delta_bar.sizes());
  TORCH_CHECK_VALUE(grad_bar.sizes() == hidden.sizes(), "grad_bar must have shape [N, H], got ",
                    grad_bar.sizes());
  return a.hidden.scalar_type() == at::kDouble ? run_backward<double>(a, delta_bar, grad_bar)
                                               : run_backward<float>(a, delta_bar, grad_bar);
}

}  // namespace fused_recoder
