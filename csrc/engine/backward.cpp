// The sequence driver, backward: truncated BPTT written by hand. With detached recoding gradients
// a recoded state passes its cotangent on unchanged (ds'/ds = I), so layers can be walked one
// after the other, top to bottom, as in a plain LSTM: everything but the recurrence itself is a
// large GEMM over all steps.
#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>

#include "context.h"
#include "loss.h"
#include "ops.h"
#include "step_network.h"

namespace fused_recoder {
namespace {

struct Cotangents {
  OptionalTensor output;          // [T,R,H]
  OptionalTensor h_n, c_n;        // [L,R,H]
  OptionalTensor nll, objective;  // [T,B]
  bool of_loss() const { return nll.has_value() || objective.has_value(); }
};

// The value that all counted positions of the per-token weights have in common, if they do: the
// usual case, where the loss is a mean or a sum.
OptionalTensor common_weight(const at::Tensor& weights, const at::Tensor& targets) {
  // One value that autograd has expanded needs no look at the values.
  bool expanded = true;
  for (int64_t d = 0; d < weights.dim(); ++d)
    expanded = expanded && (weights.stride(d) == 0 || weights.size(d) == 1);
  if (expanded) return weights.flatten()[0];
  if (!host_reads(weights.device())) return {};
  const at::Tensor counted = weights.masked_select(targets != kIgnoreTarget);
  if (counted.numel() == 0) return at::zeros({}, weights.options());
  const bool same = (counted == counted[0]).all().item<bool>();
  return same ? OptionalTensor(counted[0]) : std::nullopt;
}

// What the gradients at nll and objective give: added to that of output, and the decoder's own.
template <typename S>
void loss_backward(const Sequence& s, const Saved& saved, const Cotangents& bar,
                   const at::Tensor& output, at::Tensor& output_bar, LossGradients& decoder) {
  const at::TensorOptions accum = s.h0.options();
  const auto accumulated = [&](const OptionalTensor& t) {
    return t.has_value() ? t->to(accum) : at::Tensor();
  };
  at::Tensor nll_bar = accumulated(bar.nll), objective_bar = accumulated(bar.objective);
  if (!s.ensemble) {  // they are one
    if (nll_bar.defined()) objective_bar = nll_bar;
    nll_bar = at::Tensor();
  } else if (nll_bar.defined() && host_reads(nll_bar.device()) &&
             nll_bar.count_nonzero().item<int64_t>() == 0) {
    nll_bar = at::Tensor();  // unused, but materialised by torch.compile
  }
  const bool want_decoder = saved.decoder_weight_grad.defined();
  if (!nll_bar.defined()) {
    // A sum of the objective's gradients, weighted by row: known already.
    const at::Tensor by_row = objective_bar.repeat({1, s.R / s.B}).unsqueeze(2);  // [T,R,1]
    const at::Tensor from_loss = saved.loss_grads * by_row;
    output_bar = output_bar.defined() ? output_bar + from_loss : from_loss;
    if (!want_decoder) return;
    if (const auto weight = common_weight(objective_bar, s.targets)) {
      decoder.weight = saved.decoder_weight_grad * *weight;
      if (saved.decoder_bias_grad.defined()) decoder.bias = saved.decoder_bias_grad * *weight;
      return;
    }
  }
  if (want_decoder) decoder.weight = at::zeros_like(saved.decoder_weight_grad);
  if (saved.decoder_bias_grad.defined()) decoder.bias = at::zeros_like(saved.decoder_bias_grad);
  LossGradients wanted = decoder;
  if (nll_bar.defined()) wanted.states = at::empty({s.T, s.R, s.H}, accum);
  weighted_loss_gradients<S>(s, output, saved.member_log_p, objective_bar, nll_bar, wanted);
  if (wanted.states.defined())
    output_bar = output_bar.defined() ? output_bar + wanted.states : wanted.states;
}

// Unrecoded states [T,R,H] of a layer, for the step network: forward did not keep them.
struct RawStates {
  at::Tensor h, c;
};

RawStates raw_states(const Sequence& s, const Saved& saved, int64_t l) {
  at::Tensor c_prev = s.c0[l].unsqueeze(0);
  if (s.T > 1) c_prev = at::cat({c_prev, saved.c[l].narrow(0, 0, s.T - 1)});
  const auto gates = saved.gates[l].chunk(4, 2);  // i, f, g, o
  const at::Tensor c = gates[1] * c_prev + gates[0] * gates[2];
  return {gates[3] * c.tanh(), c};
}

std::vector<at::Tensor> step_network_gradients(const Sequence& s, const Saved& saved,
                                               const at::Tensor& step_bar) {
  std::vector<at::Tensor> gradients;
  const int64_t states = s.options.states(), N = s.T * s.R;
  for (int64_t l = 0; l < s.L; ++l) {
    const RawStates raw = raw_states(s, saved, l);
    for (int64_t i = 0; i < states; ++i) {
      const at::Tensor& state = s.options.recode_h && i == 0 ? raw.h : raw.c;
      const auto of_network = step_network_backward(
          s.step_network[l * states + i], state.reshape({N, s.H}), step_bar[l][i].reshape({N}));
      gradients.insert(gradients.end(), of_network.begin(), of_network.end());
    }
  }
  return gradients;
}

template <typename S>
BackwardResult run_backward(const Sequence& s, const Saved& saved, const Cotangents& bar,
                            const OptionalTensor& output, bool need_input_grad) {
  using A = typename AccumulateIn<S>::type;
  const Options& o = s.options;
  const int64_t T = s.T, R = s.R, H = s.H, L = s.L, states = o.states();
  const Kernels<S>& kernels = kernels_for<S>(s.input.device());
  const Launch launch = launch_on(s.input.device());
  const at::TensorOptions storage = s.input.options();
  const at::TensorOptions accum = storage.dtype(accumulate_type(s.input.scalar_type()));
  const auto accumulated = [&](const at::Tensor& t) { return t.to(accum).contiguous(); };

  const Buffer<A> gates(saved.gates), c(saved.c), step_grads(saved.step_grads);
  const Buffer<A> c0(s.c0);
  const Buffer<uint8_t> live(s.live);
  const at::Tensor grad_h0 = at::empty({L, R, H}, accum), grad_c0 = at::empty({L, R, H}, accum);
  std::vector<at::Tensor> grad_weights;
  Buffer<A> step_bar;
  if (step_grads) step_bar = Buffer<A>({L, states, T, R}, accum);
  const int64_t index_c = o.recode_h ? 1 : 0;  // of c among the recoded states

  at::Tensor from_above;  // [T,B,H] cotangent of what layer l handed up; undefined: zero
  if (bar.output.has_value()) from_above = accumulated(*bar.output);
  LossGradients decoder;
  if (bar.of_loss()) loss_backward<S>(s, saved, bar, widen(*output), from_above, decoder);
  const Buffer<S> dgates({T, R, 4 * H}, storage);
  const Buffer<A> dh({R, H}, accum), dc({R, H}, accum), carried({R, H}, accum);
  at::Tensor grad_input = at::empty({0}, storage);

  for (int64_t l = L - 1; l >= 0; --l) {
    const Layer& layer = s.layers[l];
    const bool top = l == L - 1;
    const Buffer<A> up(from_above);
    const ConstantMatrix<S> to_hidden(layer.w_hh, false, T, R);
    const auto start_from = [&](const Buffer<A>& state, const OptionalTensor& grad) {
      if (grad.has_value())
        state.tensor().copy_((*grad)[l]);
      else
        state.tensor().zero_();
    };
    start_from(dh, bar.h_n);
    start_from(dc, bar.c_n);
    const at::Tensor recurrent_mask = s.recurrent_mask(l);  // [R,H] or undefined

    for (int64_t t = T - 1; t >= 0; --t) {
      CellBackward<S> p{};
      p.rows = R;
      p.hidden = H;
      p.gates = gates(l, t);
      p.c_prev = t > 0 ? c(l, t - 1) : c0(l);
      p.dh_up = up(t);
      p.dropout = s.dropout_above(l);
      p.time = s.mask_time(t);
      p.dh_recoded = dh();
      p.dc = dc();
      p.live = live(t);
      if (step_grads && o.recode_h) {
        p.grad_h = step_grads(l, 0, t);
        p.step_bar_h = step_bar(l, 0, t);
      }
      if (step_grads && o.recode_c) {
        p.grad_c = step_grads(l, index_c, t);
        p.step_bar_c = step_bar(l, index_c, t);
      }
      p.up_is_recoded = top && o.output_is_recoded();
      p.dgates = dgates(t);
      p.dh_prev = live ? carried() : nullptr;
      kernels.cell_backward(launch, p);
      if (recurrent_mask.defined()) {
        to_hidden.multiply(R, dgates(t), dh());
        at::Tensor through = dh.tensor();
        if (live)
          at::addcmul_out(through, carried.tensor(), through, recurrent_mask);
        else
          through.mul_(recurrent_mask);
        continue;
      }
      if (live) dh.tensor().copy_(carried.tensor());
      to_hidden.multiply(R, dgates(t), dh(), nullptr, /*accumulate=*/bool(live));
    }
    grad_h0[l].copy_(dh.tensor());
    grad_c0[l].copy_(dc.tensor());

    const at::Tensor d = dgates.tensor().view({T * R, 4 * H});
    const at::Tensor below = l == 0 ? s.input.view({T * R, s.I})
                             : saved.layer_inputs.defined()
                                 ? saved.layer_inputs[l - 1].view({T * R, H})
                                 : saved.h[l - 1].view({T * R, H});
    const at::Tensor grad_w_ih = at::zeros_like(layer.w_ih), grad_w_hh = at::zeros_like(layer.w_hh);
    add_outer<S>(grad_w_ih, d, below);
    const auto recurrent = [&](const at::Tensor& h) {  // [..,R,H], as W_hh saw it
      return recurrent_mask.defined() ? h * recurrent_mask : h;
    };
    add_outer<S>(grad_w_hh, d.narrow(0, 0, R), recurrent(s.h0[l]));
    if (T > 1)
      add_outer<S>(grad_w_hh, d.narrow(0, R, (T - 1) * R),
                   recurrent(saved.h[l].narrow(0, 0, T - 1)).view({(T - 1) * R, H}));
    std::vector<at::Tensor> of_layer = {grad_w_ih, grad_w_hh};
    if (layer.bias.defined()) {
      of_layer.push_back(d.sum(0, false, accum.dtype().toScalarType()));
      of_layer.push_back(of_layer.back().clone());
    }
    // Layers come from the top downwards: put them in front.
    grad_weights.insert(grad_weights.begin(), of_layer.begin(), of_layer.end());
    if (l > 0 || need_input_grad) {
      const at::Tensor down = at::empty({T, R, below.size(1)}, accum);
      ConstantMatrix<S>(layer.w_ih, false, 1, T * R)
          .multiply(T * R, d.const_data_ptr<S>(), down.mutable_data_ptr<A>());
      (l > 0 ? from_above : grad_input) = down;
    }
  }

  if (o.variational() && need_input_grad) {  // of K copies of the input, each under its mask
    const at::Tensor mask = s.input_mask();
    if (mask.defined()) grad_input.mul_(mask);
    grad_input = grad_input.view({T, o.samples, s.B, s.I}).sum(1);
  }
  check_launches(accum.device());
  for (at::Tensor& g : grad_weights) g = g.to(s.io_type);
  at::Tensor grad_step = at::empty({0}, accum);
  std::vector<at::Tensor> grad_network;
  if (step_bar && o.step == StepKind::kPredicted)
    grad_network = step_network_gradients(s, saved, step_bar.tensor());
  else if (step_bar)
    grad_step = step_bar.tensor().sum(at::IntArrayRef{2, 3});
  const auto given = [&](const at::Tensor& t) {
    return (t.defined() ? t : at::empty({0}, accum)).to(s.io_type);
  };
  return {grad_input.to(s.io_type),
          grad_h0.to(s.state_type),
          grad_c0.to(s.state_type),
          grad_weights,
          given(decoder.weight),
          given(decoder.bias),
          grad_step,
          grad_network};
}

void check_gradient(const char* name, const OptionalTensor& grad, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(!grad.has_value() || grad->sizes() == shape, name, " must have shape ", shape,
                    ", got ", grad.has_value() ? grad->sizes() : at::IntArrayRef());
}

void check_saved(const Saved& saved, const Sequence& s) {
  const at::ScalarType compute = s.input.scalar_type();
  const auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(t.sizes() == shape && t.is_contiguous() && t.scalar_type() == compute &&
                          t.device() == s.input.device(),
                      "saved tensor ", name,
                      " is not what recode_forward returned for these "
                      "arguments: expected shape ",
                      shape, ", got ", t.sizes());
  };
  check("gates", saved.gates, {s.L, s.T, s.R, 4 * s.H});
  check("h", saved.h, {s.L, s.T, s.R, s.H});
  check("c", saved.c, {s.L, s.T, s.R, s.H});
  if (saved.layer_inputs.defined())
    check("layer_inputs", saved.layer_inputs, {s.L - 1, s.T, s.R, s.H});
  if (saved.step_grads.defined())
    check("step_grads", saved.step_grads, {s.L, s.options.states(), s.T, s.R, s.H});
  if (saved.loss_grads.defined()) check("loss_grads", saved.loss_grads, {s.T, s.R, s.H});
  if (s.V == 0) return;
  std::vector<int64_t> shape = {int64_t(s.decoders.size()), s.V, s.H};
  if (!s.ensemble) shape.erase(shape.begin());
  if (saved.decoder_weight_grad.defined())
    check("decoder_weight_grad", saved.decoder_weight_grad, shape);
  shape.pop_back();
  if (saved.decoder_bias_grad.defined()) check("decoder_bias_grad", saved.decoder_bias_grad, shape);
  if (s.ensemble) check("member_log_p", saved.member_log_p, {int64_t(s.decoders.size()), s.T, s.B});
}

}  // namespace

BackwardResult recode_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                               const OptionalTensor& grad_c_n, const OptionalTensor& grad_nll,
                               const OptionalTensor& grad_objective, at::TensorList saved_list,
                               const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                               at::TensorList weights, const OptionalTensor& decoder_weight,
                               const OptionalTensor& decoder_bias, const at::Tensor& step,
                               at::TensorList step_network, const OptionalTensor& targets,
                               const OptionalTensor& lengths, const OptionalTensor& seed,
                               const OptionalTensor& output, c10::string_view signal,
                               int64_t samples, double sample_p, bool mean_logits, bool recode_h,
                               bool recode_c, double dropout, double output_dropout,
                               c10::string_view step_kind, int64_t time, bool need_input_grad) {
  const c10::DeviceGuard guard(input.device());
  const Saved saved = Saved::from_list(saved_list);
  const Cotangents bar{grad_output, grad_h_n, grad_c_n, grad_nll, grad_objective};
  Options options;
  parse_signal(signal, options);
  options.samples = samples;
  options.sample_p = sample_p;
  options.mean_logits = mean_logits;
  options.recode_h = recode_h;
  options.recode_c = recode_c;
  options.dropout = dropout;
  options.output_dropout = output_dropout;
  options.step = parse_step(step_kind);
  options.time = time;
  options.loss = bar.of_loss();
  options.backward = true;
  const Sequence s = make_sequence({input,
                                    h0,
                                    c0,
                                    weights,
                                    decoder_weight,
                                    decoder_bias,
                                    {},
                                    step,
                                    step_network,
                                    {},
                                    targets,
                                    {},
                                    {},
                                    lengths,
                                    seed},
                                   options);
  check_saved(saved, s);
  check_gradient("grad_output", grad_output, {s.T, s.R, s.H});
  check_gradient("grad_h_n", grad_h_n, {s.L, s.R, s.H});
  check_gradient("grad_c_n", grad_c_n, {s.L, s.R, s.H});
  check_gradient("grad_nll", grad_nll, {s.T, s.B});
  check_gradient("grad_objective", grad_objective, {s.T, s.B});
  if (options.loss) {
    TORCH_CHECK_VALUE(saved.loss_grads.defined(),
                      "a gradient of the loss was given, but no loss was computed");
    TORCH_CHECK_VALUE(output.has_value(), "output must be given with the gradient of a loss");
    check_gradient("output", output, {s.T, s.R, s.H});
  }
  return s.input.scalar_type() == at::kDouble
             ? run_backward<double>(s, saved, bar, output, need_input_grad)
             : run_backward<float>(s, saved, bar, output, need_input_grad);
}

}  // namespace fused_recoder
