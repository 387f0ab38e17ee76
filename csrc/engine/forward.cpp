// The sequence driver, forward: LSTM step, signal, recoding gradient, recoding step, for each t.
// Knows no device: kernels come from the table, GEMMs from ConstantMatrix (context.h).
#include <algorithm>

#include "context.h"
#include "loss.h"
#include "ops.h"

namespace fused_recoder {
namespace {

// Up to this many rows W is read in one pass; beyond, two GEMMs at full speed are faster.
constexpr int64_t kStreamRows = 2;

template <typename S>
class Forward {
  using A = typename AccumulateIn<S>::type;

 public:
  struct Keep {
    bool states;         // everything the backward pass needs
    bool step_grads;     // also what the gradient of the step size needs
    bool decoder_grads;  // also the gradient of the loss in the decoder
    bool trace;
  };
  Forward(const Sequence& sequence, const Keep& keep);
  void run();

  at::Tensor delta_after;  // [T,B] trace
  Buffer<A> nll;           // [T,B] with a loss
  Buffer<A> delta;         // [T,B]
  Buffer<A> grad_norm;     // [L,S,T,B] trace
  Buffer<S> output;        // [T,B,H]
  Saved saved;
  at::Tensor h_n() const { return h.tensor().select(1, slot(s.T - 1)); }  // [L,B,H]
  at::Tensor c_n() const { return c.tensor().select(1, slot(s.T - 1)); }

 private:
  void cells(int64_t t);
  A* signal_gradient(int64_t t);
  void recode(int64_t t);
  void flush_decoder_gradients(int64_t end);
  void redecode();

  // States are kept for all steps where they are saved, else for this step and the last.
  int64_t slot(int64_t t) const { return save ? t : t % 2; }
  const S* h_before(int64_t l, int64_t t) const { return t > 0 ? h(l, slot(t - 1)) : h0(l); }
  const A* c_before(int64_t l, int64_t t) const { return t > 0 ? c(l, slot(t - 1)) : c0(l); }
  // Gates of layer 0 start as the projected inputs of all steps; those of the others are kept
  // only where they are saved.
  A* gates_of(int64_t l, int64_t t) const {
    return save ? gates(l, t) : l == 0 ? projected(t) : gates(l, 0);
  }
  S* layer_input_of(int64_t l, int64_t t) const { return layer_inputs(l, save ? t : 0); }

  const A* bias_of(int64_t l) const {  // [4H] or null
    return s.layers[l].bias.defined() ? s.layers[l].bias.const_data_ptr<A>() : nullptr;
  }

  // Where the unrecoded states of step t are: in the place where they are needed last, so that
  // nothing is copied.
  S* raw_h(int64_t l, int64_t t) const {
    if (!recodes_h) return h(l, slot(t));
    if (l < s.L - 1) return s.options.dropout > 0 ? h_raw(l) : layer_input_of(l, t);
    return output_is_raw ? output(t) : h_raw(l);
  }
  A* raw_c(int64_t l, int64_t t) const { return recodes_c ? c_raw(l) : c(l, slot(t)); }
  // What layer l hands up: null where it is raw_h itself.
  S* up(int64_t l, int64_t t) const {
    if (l < s.L - 1) return s.options.dropout > 0 ? layer_input_of(l, t) : nullptr;
    if (s.options.output_is_recoded()) return decoder_input();
    return output_is_raw ? nullptr : output(t);
  }
  const S* above(int64_t l, int64_t t) const {
    const S* handed = up(l, t);
    return handed != nullptr ? handed : raw_h(l, t);
  }

  const Sequence& s;
  const bool save, trace, recodes_h, recodes_c, output_is_raw;
  const Kernels<S>& kernels;
  const Launch launch;
  const at::TensorOptions storage, accum;

  std::vector<ConstantMatrix<S>> from_below;   // [I or H -> 4H] by layer
  std::vector<ConstantMatrix<S>> from_hidden;  // [H -> 4H]
  std::vector<ConstantMatrix<S>> to_below;  // [4H -> H] gradients of the gates to the layer below
  ConstantMatrix<S> decode, decode_back;    // [H -> V], [V -> H]

  Buffer<S> h0;                     // [L,B,H]
  Buffer<A> c0;                     // [L,B,H]
  Buffer<S> h;                      // [L, T or 2, B, H] recoded
  Buffer<A> c;                      // [L, T or 2, B, H] recoded
  Buffer<A> gates;                  // [L, T or 1, B, 4H]
  Buffer<A> projected;              // [T,B,4H] (saved: gates of layer 0)
  Buffer<S> layer_inputs;           // [L-1, T or 1, B, H]
  Buffer<S> h_raw;                  // [L,B,H]
  Buffer<A> c_raw;                  // [L,B,H]
  Buffer<S> decoder_input;          // [B,H]
  Buffer<A> logits;                 // [rows,B,V] logits, then the direction of u
  Buffer<A> dh;                     // [B,H]
  Buffer<S> dgates;                 // [B,4H]
  Buffer<A> scale;                  // [B]
  Buffer<A> step;                   // [L,S]
  Buffer<A> step_grads;             // [L,S,T,B,H]
  Buffer<int64_t> targets, chosen;  // [T,B] given, in use
  Buffer<uint8_t> live, active;     // [T,B]
  Buffer<S> after;                  // [T,B,H] trace
  Buffer<A> stream_scratch;         // present: decode in one pass over W
  Buffer<A> loss_grads;             // [T,B,H]
  LossGradients decoder_grads;
  int64_t steps_per_flush = 1;  // steps of logits held for one update of the decoder's gradient
};

template <typename S>
Forward<S>::Forward(const Sequence& sequence, const Keep& keep)
    : s(sequence),
      save(keep.states),
      trace(keep.trace && s.options.recodes()),
      recodes_h(s.options.recodes() && s.options.recode_h),
      recodes_c(s.options.recodes() && s.options.recode_c),
      output_is_raw(recodes_h && !s.options.output_is_recoded() && s.options.output_dropout == 0 &&
                    !s.live.defined()),
      kernels(kernels_for<S>(s.input.device())),
      launch(launch_on(s.input.device())),
      storage(s.input.options()),
      accum(storage.dtype(accumulate_type(s.input.scalar_type()))),
      h0(s.h0),
      c0(s.c0),
      live(s.live),
      active(s.active) {
  const Options& o = s.options;
  const int64_t T = s.T, B = s.B, H = s.H, L = s.L, states = o.states();
  output = Buffer<S>({T, B, H}, storage);
  h = Buffer<S>({L, save ? T : 2, B, H}, storage);
  c = Buffer<A>({L, save ? T : 2, B, H}, accum);
  gates = Buffer<A>({L, save ? T : 1, B, 4 * H}, accum);
  projected = save ? Buffer<A>(gates.tensor()[0]) : Buffer<A>({T, B, 4 * H}, accum);
  if (L > 1 && (recodes_h || o.dropout > 0))
    layer_inputs = Buffer<S>({L - 1, save ? T : 1, B, H}, storage);
  for (int64_t l = 0; l < L; ++l) {
    const Layer& layer = s.layers[l];
    from_hidden.emplace_back(layer.w_hh, true, T, B);
    from_below.push_back(l > 0 ? ConstantMatrix<S>(layer.w_ih, true, T, B)
                               : ConstantMatrix<S>(layer.w_ih, true, 1, T * B));
    to_below.push_back(l > 0 && o.recodes() ? ConstantMatrix<S>(layer.w_ih, false, T, B)
                                            : ConstantMatrix<S>());
  }
  delta = Buffer<A>(at::zeros({T, B}, accum));
  if (o.loss) {
    nll = Buffer<A>({T, B}, accum);
    if (save) loss_grads = Buffer<A>({T, B, H}, accum);
    if (save && keep.decoder_grads) {
      decoder_grads.weight = at::zeros({s.V, H}, accum);
      if (s.decoder_bias.defined()) decoder_grads.bias = at::zeros({s.V}, accum);
    }
  }
  if (!o.recodes()) return;

  if (kernels.stream_decode != nullptr && B <= kStreamRows && !decoder_grads.weight.defined())
    stream_scratch = Buffer<A>({kernels.stream_scratch(B, H)}, accum);
  if (!stream_scratch || this->trace) decode = ConstantMatrix<S>(s.decoder_weight, true, T, B);
  if (!stream_scratch) decode_back = ConstantMatrix<S>(s.decoder_weight, false, T, B);
  if (recodes_h) h_raw = Buffer<S>({L, B, H}, storage);
  if (recodes_c) c_raw = Buffer<A>({L, B, H}, accum);
  if (o.output_is_recoded()) decoder_input = Buffer<S>({B, H}, storage);
  if (o.loss_shares_gradient() && decoder_grads.weight.defined())
    steps_per_flush = loss_chunk_rows(s.V, B, T * B) / B;
  if (!stream_scratch) logits = Buffer<A>({steps_per_flush, B, s.V}, accum);
  dh = Buffer<A>({B, H}, accum);
  if (L > 1) dgates = Buffer<S>({B, 4 * H}, storage);
  scale = Buffer<A>({B}, accum);
  step = Buffer<A>(s.step);
  if (save && keep.step_grads) step_grads = Buffer<A>({L, states, T, B, H}, accum);
  if (reads_target(o.signal)) {
    chosen = Buffer<int64_t>({T, B}, accum.dtype(at::kLong));
    if (!o.argmax) targets = Buffer<int64_t>(s.targets);
  }
  if (this->trace) {
    after = Buffer<S>({T, B, H}, storage);
    grad_norm = Buffer<A>({L, states, T, B}, accum);
  }
}

// All layers of step t.
template <typename S>
void Forward<S>::cells(int64_t t) {
  for (int64_t l = 0; l < s.L; ++l) {
    A* gates_t = gates_of(l, t);
    if (l > 0) {
      from_below[l].multiply(s.B, above(l - 1, t), gates_t, bias_of(l));
    }
    from_hidden[l].multiply(s.B, h_before(l, t), gates_t, nullptr, /*accumulate=*/true);

    CellForward<S> p{};
    p.rows = s.B;
    p.hidden = s.H;
    p.gates = gates_t;
    p.c_prev = c_before(l, t);
    p.h_prev = h_before(l, t);
    p.live = live(t);
    p.h = raw_h(l, t);
    p.c = raw_c(l, t);
    p.h_up = up(l, t);
    p.dropout = s.dropout_above(l);
    p.time = static_cast<uint32_t>(t);
    kernels.cell_forward(launch, p);
  }
}

// The signal of step t and its gradient in what the decoder read, [B,H], still to be multiplied by
// `scale` [B].
template <typename S>
auto Forward<S>::signal_gradient(int64_t t) -> A* {
  const Options& o = s.options;
  const A* bias = s.decoder_bias.defined() ? s.decoder_bias.const_data_ptr<A>() : nullptr;
  // Saving 1 of the design: the same direction is the gradient of the loss and, times `scale`,
  // that of the signal.
  const bool shared = o.loss_shares_gradient();
  A* log_p = shared ? nll(t) : nullptr;
  A* dh_top = shared && save ? loss_grads(t) : dh();
  if (stream_scratch) {
    StreamDecode<S> p{};
    p.rows = s.B;
    p.hidden = s.H;
    p.vocab = s.V;
    p.kind = o.signal;
    p.h = above(s.L - 1, t);
    p.weight = s.decoder_weight.const_data_ptr<S>();
    p.bias = bias;
    p.targets = targets(t);
    p.scratch = stream_scratch();
    p.dh = dh_top;
    p.delta = delta(t);
    p.scale = scale();
    p.log_p = log_p;
    p.chosen = chosen(t);
    kernels.stream_decode(launch, p);
    return dh_top;
  }
  A* rows = logits(t % steps_per_flush);  // [B,V]
  decode.multiply(s.B, above(s.L - 1, t), rows, bias);
  SoftmaxSignal<S> p{};
  p.rows = s.B;
  p.vocab = s.V;
  p.kind = o.signal;
  p.logits = rows;
  p.targets = targets(t);
  p.direction = rows;
  p.delta = delta(t);
  p.scale = scale();
  p.log_p = log_p;
  p.chosen = chosen(t);
  kernels.softmax_signal(launch, p);
  decode_back.multiply(s.B, rows, dh_top);
  if (shared) flush_decoder_gradients(t + 1);
  return dh_top;
}

// Takes the recoding step: the signal's gradient goes down the layers of step t.
template <typename S>
void Forward<S>::recode(int64_t t) {
  const Options& o = s.options;
  const A* dh_top = signal_gradient(t);
  const int64_t index_c = o.recode_h ? 1 : 0;  // of c among the recoded states
  for (int64_t l = s.L - 1; l >= 0; --l) {
    const bool top = l == s.L - 1;
    Recode<S> p{};
    p.rows = s.B;
    p.hidden = s.H;
    p.gates = gates_of(l, t);
    p.c_prev = c_before(l, t);
    p.c = raw_c(l, t);
    p.h = raw_h(l, t);
    p.dh = top ? dh_top : dh();
    p.row_scale = top ? scale() : nullptr;
    p.dropout = s.dropout_above(l);
    p.time = static_cast<uint32_t>(t);
    p.active = active(t);
    p.live = live(t);
    p.h_recoded = h(l, slot(t));
    p.c_recoded = c(l, slot(t));
    if (top && o.output_is_recoded()) p.h_up = output(t);
    if (top) p.h_after = after(t);
    p.dgates = l > 0 ? dgates() : nullptr;
    if (o.recode_h) {
      p.alpha_h.step = step(l, 0);
      p.grad_h = step_grads(l, 0, t);
      p.norm_h = grad_norm(l, 0, t);
    }
    if (o.recode_c) {
      p.alpha_c.step = step(l, index_c);
      p.grad_c = step_grads(l, index_c, t);
      p.norm_c = grad_norm(l, index_c, t);
    }
    kernels.recode(launch, p);
    if (l > 0) to_below[l].multiply(s.B, dgates(), dh());
  }
}

// Once enough steps are collected, their rows of logits become one large GEMM.
template <typename S>
void Forward<S>::flush_decoder_gradients(int64_t end) {
  if (!decoder_grads.weight.defined()) return;
  const int64_t steps = (end - 1) % steps_per_flush + 1;
  if (steps < steps_per_flush && end < s.T) return;
  add_decoder_gradients<S>(decoder_grads,
                           logits.tensor().narrow(0, 0, steps).view({steps * s.B, s.V}),
                           output.tensor().narrow(0, end - steps, steps).view({steps * s.B, s.H}));
}

// delta_after: the signal of the recoded top states, all steps in a few large GEMMs.
template <typename S>
void Forward<S>::redecode() {
  const A* bias = s.decoder_bias.defined() ? s.decoder_bias.const_data_ptr<A>() : nullptr;
  Buffer<A> values({s.T, s.B}, accum);
  const int64_t rows = s.T * s.B;
  const int64_t chunk = std::clamp<int64_t>((int64_t(1) << 22) / s.V, 1, rows);
  const at::Tensor buffer = at::empty({chunk, s.V}, accum);
  for (int64_t start = 0; start < rows; start += chunk) {
    const int64_t size = std::min(chunk, rows - start);
    const at::Tensor part = buffer.narrow(0, 0, size);
    decode.multiply(size, after() + start * s.H, part.mutable_data_ptr<A>(), bias);
    SoftmaxSignal<S> signal{};
    signal.rows = size;
    signal.vocab = s.V;
    signal.kind = s.options.signal;
    signal.logits = part.mutable_data_ptr<A>();
    signal.targets = chosen ? chosen() + start : nullptr;
    signal.delta = values() + start;
    kernels.softmax_signal(launch, signal);
  }
  delta_after = values.tensor();
}

template <typename S>
void Forward<S>::run() {
  // The input's share of the gates of layer 0, for all steps at once.
  from_below[0].multiply(s.T * s.B, s.input.const_data_ptr<S>(), projected(), bias_of(0));
  for (int64_t t = 0; t < s.T; ++t) {
    cells(t);
    if (s.options.recodes()) recode(t);
  }
  if (s.options.loss_shares_gradient()) {
    nll.tensor().neg_();  // the kernel writes log p
  } else if (s.options.loss) {
    LossGradients gradients = decoder_grads;
    if (loss_grads) gradients.states = loss_grads.tensor().view({s.T * s.B, s.H});
    decoder_loss<S>(s, output.tensor().view({s.T * s.B, s.H}), s.targets.flatten(), {},
                    nll.tensor().view({s.T * s.B}), gradients);
  }
  if (trace) redecode();
  // What does not count has no signal: behind the end, or an ignored target.
  at::Tensor counted = s.live;
  if (s.targets.defined()) counted = s.targets != kIgnoreTarget;
  if (counted.defined()) {
    const at::Tensor uncounted = counted == 0;
    delta.tensor().masked_fill_(uncounted, 0);
    if (delta_after.defined()) delta_after.masked_fill_(uncounted, 0);
  }
  if (save)
    saved = {gates.tensor(),      h.tensor(),          c.tensor(),           layer_inputs.tensor(),
             step_grads.tensor(), loss_grads.tensor(), decoder_grads.weight, decoder_grads.bias};
}

template <typename S>
ForwardResult run_forward(const Sequence& s, bool save, bool save_step_grads,
                          bool save_decoder_grads, bool trace) {
  Forward<S> forward(s, {save, save_step_grads, save_decoder_grads, trace});
  forward.run();
  const auto none = [&] { return at::empty({0}, forward.delta.tensor().options()); };
  at::Tensor delta_after = none(), step_size = none(), grad_norm = none();
  if (trace && s.options.recodes()) {
    const int64_t states = s.options.states();
    delta_after = forward.delta_after;
    grad_norm = forward.grad_norm.tensor();
    step_size = s.step.view({s.L, states, 1, 1}).expand({s.L, states, s.T, s.B});
    at::Tensor taken;  // [T,B]
    if (s.active.defined()) taken = s.active;
    if (s.live.defined()) taken = taken.defined() ? taken * s.live : s.live;
    step_size = taken.defined() ? step_size * taken : step_size.contiguous();
  }
  return {forward.output.tensor().to(s.io_type),
          forward.h_n().to(s.state_type, /*non_blocking=*/false, /*copy=*/true),
          forward.c_n().to(s.state_type, /*non_blocking=*/false, /*copy=*/true),
          s.options.loss ? forward.nll.tensor() : none(),
          forward.delta.tensor(),
          delta_after,
          step_size,
          grad_norm,
          save ? forward.saved.list() : std::vector<at::Tensor>()};
}

}  // namespace

std::vector<at::Tensor> Saved::list() const {
  std::vector<at::Tensor> list = {
      gates, h, c, layer_inputs, step_grads, loss_grads, decoder_weight_grad, decoder_bias_grad};
  for (at::Tensor& t : list)
    if (!t.defined()) t = at::empty({0}, gates.options());
  return list;
}

Saved Saved::from_list(at::TensorList list) {
  TORCH_CHECK_VALUE(list.size() == 8, "saved must hold 8 tensors, got ", list.size());
  const auto present = [](const at::Tensor& t) { return t.numel() > 0 ? t : at::Tensor(); };
  return {list[0],          list[1],          list[2],          present(list[3]),
          present(list[4]), present(list[5]), present(list[6]), present(list[7])};
}

ForwardResult recode_forward(const at::Tensor& input, const at::Tensor& h0, const at::Tensor& c0,
                             at::TensorList weights, const OptionalTensor& decoder_weight,
                             const OptionalTensor& decoder_bias, const at::Tensor& step,
                             const OptionalTensor& targets, const OptionalTensor& mask,
                             const OptionalTensor& lengths, const OptionalTensor& seed,
                             c10::string_view signal, bool argmax, bool recode_h, bool recode_c,
                             double dropout, double output_dropout, bool loss, bool save,
                             bool save_step_grads, bool save_decoder_grads, bool trace) {
  const Options options{parse_signal(signal), argmax, recode_h, recode_c, dropout,
                        output_dropout,       loss};
  const Sequence s = make_sequence(input, h0, c0, weights, decoder_weight, decoder_bias, step,
                                   targets, mask, lengths, seed, options);
  return s.input.scalar_type() == at::kDouble
             ? run_forward<double>(s, save, save_step_grads, save_decoder_grads, trace)
             : run_forward<float>(s, save, save_step_grads, save_decoder_grads, trace);
}

}  // namespace fused_recoder
