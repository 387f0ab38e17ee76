// The sequence driver, backward: truncated BPTT written by hand. With detached recoding gradients
// a recoded state passes its cotangent on unchanged (ds'/ds = I), so layers can be walked one
// after the other, top to bottom, as in a plain LSTM: everything but the recurrence itself is a
// large GEMM over all steps.
#include <ATen/ops/zeros_like.h>

#include "context.h"
#include "loss.h"
#include "ops.h"

namespace fused_recoder {
namespace {

struct Cotangents {
  OptionalTensor output;    // [T,B,H]
  OptionalTensor h_n, c_n;  // [L,B,H]
  OptionalTensor nll;       // [T,B]
};

// The value that all counted positions of the per-token weights have in common, if they do: the
// usual case, where the loss is a mean or a sum.
std::optional<double> common_weight(const at::Tensor& weights, const at::Tensor& targets) {
  if (!weights.is_cpu()) return {};  // looking would synchronise
  const at::Tensor counted = weights.masked_select(targets != kIgnoreTarget);
  if (counted.numel() == 0) return 0.0;
  const double low = counted.min().item<double>(), high = counted.max().item<double>();
  return low == high ? std::optional<double>(low) : std::nullopt;
}

// What the gradient at nll gives: added to that of output, and the decoder's own.
template <typename S>
void loss_backward(const Sequence& s, const Saved& saved, const at::Tensor& nll_bar,
                   const at::Tensor& output, at::Tensor& output_bar, LossGradients& decoder) {
  const at::Tensor from_loss = saved.loss_grads * nll_bar.unsqueeze(2);  // [T,B,H]
  output_bar = output_bar.defined() ? output_bar + from_loss : from_loss;
  if (!saved.decoder_weight_grad.defined()) return;
  if (const auto weight = common_weight(nll_bar, s.targets)) {
    decoder.weight = saved.decoder_weight_grad * *weight;
    if (saved.decoder_bias_grad.defined()) decoder.bias = saved.decoder_bias_grad * *weight;
    return;
  }
  decoder.weight = at::zeros({s.V, s.H}, nll_bar.options());
  if (saved.decoder_bias_grad.defined()) decoder.bias = at::zeros({s.V}, nll_bar.options());
  const at::Tensor nll = at::empty({s.T * s.B}, nll_bar.options());
  decoder_loss<S>(s, output.view({s.T * s.B, s.H}), s.targets.flatten(), nll_bar.flatten(), nll,
                  decoder);
}

template <typename S>
BackwardResult run_backward(const Sequence& s, const Saved& saved, const Cotangents& bar,
                            const OptionalTensor& output, bool need_input_grad) {
  using A = typename AccumulateIn<S>::type;
  const Options& o = s.options;
  const int64_t T = s.T, B = s.B, H = s.H, L = s.L, states = o.states();
  const Kernels<S>& kernels = kernels_for<S>(s.input.device());
  const Launch launch = launch_on(s.input.device());
  const at::TensorOptions storage = s.input.options();
  const at::TensorOptions accum = storage.dtype(accumulate_type(s.input.scalar_type()));
  const auto accumulated = [&](const at::Tensor& t) { return t.to(accum).contiguous(); };

  const Buffer<A> gates(saved.gates), c(saved.c), step_grads(saved.step_grads);
  const Buffer<A> c0(s.c0);
  const Buffer<uint8_t> live(s.live);
  const at::Tensor grad_h0 = at::empty({L, B, H}, accum), grad_c0 = at::empty({L, B, H}, accum);
  std::vector<at::Tensor> grad_weights;
  Buffer<A> step_bar;
  if (step_grads) step_bar = Buffer<A>({L, states, T, B}, accum);
  const int64_t index_c = o.recode_h ? 1 : 0;  // of c among the recoded states

  at::Tensor from_above;  // [T,B,H] cotangent of what layer l handed up; undefined: zero
  if (bar.output.has_value()) from_above = accumulated(*bar.output);
  LossGradients decoder;
  if (bar.nll.has_value())
    loss_backward<S>(s, saved, accumulated(*bar.nll), widen(*output), from_above, decoder);
  const Buffer<S> dgates({T, B, 4 * H}, storage);
  const Buffer<A> dh({B, H}, accum), dc({B, H}, accum), carried({B, H}, accum);
  at::Tensor grad_input = at::empty({0}, storage);

  for (int64_t l = L - 1; l >= 0; --l) {
    const Layer& layer = s.layers[l];
    const bool top = l == L - 1;
    const Buffer<A> up(from_above);
    const ConstantMatrix<S> to_hidden(layer.w_hh, false, T, B);
    const auto start_from = [&](const Buffer<A>& state, const OptionalTensor& grad) {
      if (grad.has_value())
        state.tensor().copy_((*grad)[l]);
      else
        state.tensor().zero_();
    };
    start_from(dh, bar.h_n);
    start_from(dc, bar.c_n);

    for (int64_t t = T - 1; t >= 0; --t) {
      CellBackward<S> p{};
      p.rows = B;
      p.hidden = H;
      p.gates = gates(l, t);
      p.c_prev = t > 0 ? c(l, t - 1) : c0(l);
      p.dh_up = up(t);
      p.dropout = s.dropout_above(l);
      p.time = static_cast<uint32_t>(t);
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
      if (live) dh.tensor().copy_(carried.tensor());
      to_hidden.multiply(B, dgates(t), dh(), nullptr, /*accumulate=*/bool(live));
    }
    grad_h0[l].copy_(dh.tensor());
    grad_c0[l].copy_(dc.tensor());

    const at::Tensor d = dgates.tensor().view({T * B, 4 * H});
    const at::Tensor below = l == 0 ? s.input.view({T * B, s.I})
                             : saved.layer_inputs.defined()
                                 ? saved.layer_inputs[l - 1].view({T * B, H})
                                 : saved.h[l - 1].view({T * B, H});
    const at::Tensor grad_w_ih = at::zeros_like(layer.w_ih), grad_w_hh = at::zeros_like(layer.w_hh);
    add_outer<S>(grad_w_ih, d, below);
    add_outer<S>(grad_w_hh, d.narrow(0, 0, B), s.h0[l]);
    if (T > 1)
      add_outer<S>(grad_w_hh, d.narrow(0, B, (T - 1) * B),
                   saved.h[l].view({T * B, H}).narrow(0, 0, (T - 1) * B));
    std::vector<at::Tensor> of_layer = {grad_w_ih, grad_w_hh};
    if (layer.bias.defined()) {
      of_layer.push_back(d.sum(0, false, accum.dtype().toScalarType()));
      of_layer.push_back(of_layer.back().clone());
    }
    // Layers come from the top downwards: put them in front.
    grad_weights.insert(grad_weights.begin(), of_layer.begin(), of_layer.end());
    if (l > 0 || need_input_grad) {
      const at::Tensor down = at::empty({T, B, below.size(1)}, accum);
      ConstantMatrix<S>(layer.w_ih, false, 1, T * B)
          .multiply(T * B, d.const_data_ptr<S>(), down.mutable_data_ptr<A>());
      (l > 0 ? from_above : grad_input) = down;
    }
  }

  for (at::Tensor& g : grad_weights) g = g.to(s.io_type);
  at::Tensor grad_step = at::empty({0}, accum);
  if (step_bar) grad_step = step_bar.tensor().sum(at::IntArrayRef{2, 3});
  const auto given = [&](const at::Tensor& t) {
    return (t.defined() ? t : at::empty({0}, accum)).to(s.io_type);
  };
  return {grad_input.to(s.io_type),
          grad_h0.to(s.state_type),
          grad_c0.to(s.state_type),
          grad_weights,
          given(decoder.weight),
          given(decoder.bias),
          grad_step};
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
  check("gates", saved.gates, {s.L, s.T, s.B, 4 * s.H});
  check("h", saved.h, {s.L, s.T, s.B, s.H});
  check("c", saved.c, {s.L, s.T, s.B, s.H});
  if (saved.layer_inputs.defined())
    check("layer_inputs", saved.layer_inputs, {s.L - 1, s.T, s.B, s.H});
  if (saved.step_grads.defined())
    check("step_grads", saved.step_grads, {s.L, s.options.states(), s.T, s.B, s.H});
  if (saved.loss_grads.defined()) check("loss_grads", saved.loss_grads, {s.T, s.B, s.H});
  if (s.V > 0 && saved.decoder_weight_grad.defined())
    check("decoder_weight_grad", saved.decoder_weight_grad, {s.V, s.H});
  if (s.V > 0 && saved.decoder_bias_grad.defined())
    check("decoder_bias_grad", saved.decoder_bias_grad, {s.V});
}

}  // namespace

BackwardResult recode_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                               const OptionalTensor& grad_c_n, const OptionalTensor& grad_nll,
                               at::TensorList saved_list, const at::Tensor& input,
                               const at::Tensor& h0, const at::Tensor& c0, at::TensorList weights,
                               const OptionalTensor& decoder_weight,
                               const OptionalTensor& decoder_bias, const at::Tensor& step,
                               const OptionalTensor& targets, const OptionalTensor& lengths,
                               const OptionalTensor& seed, const OptionalTensor& output,
                               c10::string_view signal, bool recode_h, bool recode_c,
                               double dropout, double output_dropout, bool need_input_grad) {
  const Saved saved = Saved::from_list(saved_list);
  const bool loss = grad_nll.has_value();
  const Options options{SignalKind::kNone, false,          recode_h, recode_c,
                        dropout,           output_dropout, loss};
  Sequence s = make_sequence(input, h0, c0, weights, decoder_weight, decoder_bias, step, targets,
                             {}, lengths, seed, options);
  s.options.signal = parse_signal(signal);  // after the checks: the signal itself is not needed
  check_saved(saved, s);
  check_gradient("grad_output", grad_output, {s.T, s.B, s.H});
  check_gradient("grad_h_n", grad_h_n, {s.L, s.B, s.H});
  check_gradient("grad_c_n", grad_c_n, {s.L, s.B, s.H});
  check_gradient("grad_nll", grad_nll, {s.T, s.B});
  if (loss) {
    TORCH_CHECK_VALUE(saved.loss_grads.defined(), "grad_nll was given, but no loss was computed");
    TORCH_CHECK_VALUE(output.has_value(), "output must be given with grad_nll");
    check_gradient("output", output, {s.T, s.B, s.H});
  }
  const Cotangents bar{grad_output, grad_h_n, grad_c_n, grad_nll};
  return s.input.scalar_type() == at::kDouble
             ? run_backward<double>(s, saved, bar, output, need_input_grad)
             : run_backward<float>(s, saved, bar, output, need_input_grad);
}

}  // namespace fused_recoder
