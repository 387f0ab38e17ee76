// Signals of one prediction: nll, surprisal, entropy (also that of an ensemble's mean logits, which
// are one decoder's). Two GEMMs with the decoder and one pass over the logits; few rows are
// streamed through W in one pass instead. What kernels compute of a row: kernels/math.h.
#include <ATen/ops/zeros_like.h>

#include "decoded.h"
#include "makers.h"

namespace fused_recoder {
namespace {

// W is read in one pass for few rows (kernels/limits.h), of gold signals as long as their gradients
// [B,H] stay in the core's cache; beyond, two GEMMs at full speed are faster. (Of the entropy one
// pass is three products.)
constexpr int64_t kStreamGoldElements = 14 << 10;

template <typename S>
class OnePrediction final : public DecodedSignal<S> {
  using typename DecodedSignal<S>::A;
  using typename DecodedSignal<S>::TopGradient;
  using typename Signal<S>::Forward;
  using typename Signal<S>::Backward;
  using Signal<S>::p;
  using Signal<S>::kernels;
  using Signal<S>::launch;

 public:
  explicit OnePrediction(const Problem& problem)
      : DecodedSignal<S>(problem),
        decoder(p.ensemble ? p.mean_decoder() : p.decoders[0]),
        row(p.signal.row(p.spec)) {}

  void begin_forward(const Forward& pass) override;
  void begin_backward(const Backward& pass) override;
  void curvature(int64_t t, const S* top, const S* gradient_bar, A* top_bar) override;
  void finish_backward() override;

 private:
  TopGradient top_gradient(int64_t t, const S* top, A* delta) override;
  void value(int64_t t, const S* top, A* delta) override;

  bool few_rows() const {
    return p.B <= kStreamRows ||
           (p.signal.reads_target && p.B <= kStreamGoldRows && p.B * p.H <= kStreamGoldElements);
  }
  int64_t* chosen_at(int64_t t) const { return chosen(keeps_chosen ? t : 0); }
  SoftmaxSignal<S> softmax(A* rows, const int64_t* tokens, A* delta) const;
  StreamDecode<S> stream(A* rows, const S* top, const int64_t* tokens, A* delta) const;
  void collect(int64_t end) const;
  void flush_backward();
  void copy_rows(S* to, const S* from) const { this->rows_at(to).copy_(this->rows_at(from)); }

  const LinearMap decoder;
  const RowSignal row;
  ConstantMatrix<S> decode, decode_back;  // [H -> V], [V -> H]
  Buffer<uint8_t> scratch;                // of softmax_signal
  Buffer<int64_t> chosen;                 // [T or 1,B] the targets in use
  bool keeps_chosen = false;

  // forward
  SharedLoss<S> shared;
  int64_t steps_per_flush = 1;  // time steps of logits held for one update of the gradient
  Buffer<A> logits;             // [steps,B,V]
  Buffer<A> trial_logits;       // [B,V]
  Buffer<A> stream_scratch;     // present: decode in one pass over W
  Buffer<A> dh;                 // [B,H]
  Buffer<A> scale;              // [B]
  Buffer<int64_t> targets;      // [T,B] given

  // backward: the logits are made again, next to the cotangent of u
  LossGradients wanted, own;  // of the decoder(s); of the one decoder
  Buffer<A> loss_bar;         // [T,B] or absent
  int64_t held = 0;           // time steps in `rows`
  Buffer<S> input;            // [2,B,H]
  Buffer<A> rows;             // [steps,2,B,V] logits and u_bar, then u and l_bar
  Buffer<S> states_held;      // [steps,2,B,H]
};

template <typename S>
void OnePrediction<S>::begin_forward(const Forward& pass) {
  DecodedSignal<S>::begin_forward(pass);
  shared = pass.shared;
  const at::TensorOptions accum = p.accum();
  const bool collects = shared.gradients.weight.defined();
  const bool streams = kernels.stream_decode != nullptr && few_rows();
  if (streams) {
    stream_scratch = Buffer<A>({kernels.stream_scratch(p.B, p.H)}, accum);
  } else {
    decode = ConstantMatrix<S>(decoder.weight, true, pass.values() ? 2 * p.T : p.T, p.B);
    decode_back = ConstantMatrix<S>(decoder.weight, false, p.T, p.B);
    scratch = softmax_scratch(kernels, p.B, p.V, p.device());
  }
  if (collects) {
    const int64_t most = loss_chunk_rows(p.V, p.B, p.T * p.B) / p.B;
    const int64_t flushes = (p.T + most - 1) / most;
    steps_per_flush = (p.T + flushes - 1) / flushes;
  }
  if (!streams || collects || p.B > kStreamRows)
    logits = Buffer<A>({steps_per_flush, p.B, p.V}, accum);
  if (pass.values()) trial_logits = Buffer<A>({p.B, p.V}, accum);
  dh = Buffer<A>({p.B, p.H}, accum);
  scale = Buffer<A>({p.B}, accum);
  if (!p.signal.reads_target) return;
  keeps_chosen = bool(shared.chosen);
  chosen = keeps_chosen ? shared.chosen : Buffer<int64_t>({1, p.B}, accum.dtype(at::kLong));
  if (!p.spec.argmax) targets = Buffer<int64_t>(p.targets);
}

template <typename S>
typename OnePrediction<S>::TopGradient OnePrediction<S>::top_gradient(int64_t t, const S* top,
                                                                      A* delta) {
  // The same direction is the gradient of the loss and, times `scale`, that of the signal.
  A* dh_top = shared.loss_grads ? shared.loss_grads(t) : dh();
  A* at_t = logits(t % steps_per_flush);  // [B,V] logits, then the direction of u
  if (stream_scratch) {
    StreamDecode<S> k = stream(at_t, top, targets(t), delta);
    k.direction = shared.gradients.weight.defined() ? at_t : nullptr;
    k.dh = dh_top;
    k.scale = scale();
    k.log_p = shared.log_p(t);
    k.chosen = chosen_at(t);
    kernels.stream_decode(launch, k);
  } else {
    decode.multiply(p.B, top, at_t, this->bias_of(decoder));
    SoftmaxSignal<S> k = softmax(at_t, targets(t), delta);
    k.direction = at_t;
    k.scale = scale();
    k.log_p = shared.log_p(t);
    k.chosen = chosen_at(t);
    kernels.softmax_signal(launch, k);
    decode_back.multiply(p.B, at_t, dh_top);
  }
  collect(t + 1);
  return {dh_top, scale()};
}

// Of the target that the gradient was taken for.
template <typename S>
void OnePrediction<S>::value(int64_t t, const S* top, A* delta) {
  if (stream_scratch) {
    kernels.stream_decode(launch, stream(trial_logits(), top, chosen_at(t), delta));
    return;
  }
  decode.multiply(p.B, top, trial_logits(), this->bias_of(decoder));
  kernels.softmax_signal(launch, softmax(trial_logits(), chosen_at(t), delta));
}

template <typename S>
SoftmaxSignal<S> OnePrediction<S>::softmax(A* rows, const int64_t* tokens, A* delta) const {
  SoftmaxSignal<S> k{};
  k.rows = p.B;
  k.vocab = p.V;
  k.signal = row;
  k.logits = rows;
  k.targets = tokens;
  k.delta = delta;
  k.scratch = scratch();
  return k;
}

template <typename S>
StreamDecode<S> OnePrediction<S>::stream(A* rows, const S* top, const int64_t* tokens,
                                         A* delta) const {
  StreamDecode<S> k{};
  k.rows = p.B;
  k.hidden = p.H;
  k.vocab = p.V;
  k.signal = row;
  k.h = top;
  k.weight = decoder.weight.template const_data_ptr<S>();
  k.bias = this->bias_of(decoder);
  k.targets = tokens;
  k.scratch = stream_scratch();
  k.logits = rows;
  k.delta = delta;
  return k;
}

// Once enough time steps are collected, their rows of logits become one large GEMM.
template <typename S>
void OnePrediction<S>::collect(int64_t end) const {
  if (!shared.gradients.weight.defined()) return;
  const int64_t steps = (end - 1) % steps_per_flush + 1;
  if (steps < steps_per_flush && end < p.T) return;
  add_decoder_gradients<S>(
      shared.gradients, logits.tensor().narrow(0, 0, steps).view({steps * p.B, p.V}),
      this->states->output.tensor().narrow(0, end - steps, steps).view({steps * p.B, p.H}));
}

template <typename S>
void OnePrediction<S>::begin_backward(const Backward& pass) {
  wanted = own = pass.decoder;
  if (p.ensemble && own.weight.defined()) own.weight = at::zeros_like(decoder.weight);
  if (p.ensemble && own.bias.defined()) own.bias = at::zeros_like(decoder.bias);
  decode = ConstantMatrix<S>(decoder.weight, true, p.T, 2 * p.B);
  decode_back = ConstantMatrix<S>(decoder.weight, false, p.T, p.B);
  chosen = Buffer<int64_t>(pass.saved.chosen);
  keeps_chosen = true;
  loss_bar = Buffer<A>(pass.loss_bar);
  scratch = softmax_scratch(kernels, p.B, p.V, p.device());
  const int64_t steps = loss_chunk_rows(p.V, 2 * p.B, 2 * p.T * p.B) / (2 * p.B);
  input = Buffer<S>({2, p.B, p.H}, p.storage());
  rows = Buffer<A>({steps, 2, p.B, p.V}, p.accum());
  states_held = Buffer<S>({steps, 2, p.B, p.H}, p.storage());
}

template <typename S>
void OnePrediction<S>::curvature(int64_t t, const S* top, const S* gradient_bar, A* top_bar) {
  copy_rows(input(0), top);
  copy_rows(input(1), gradient_bar);
  // The logits once more, and the cotangent of u: W is read once for both.
  decode.multiply(2 * p.B, input(), rows(held));
  if (decoder.bias.defined()) rows.tensor()[held][0].add_(decoder.bias);
  SoftmaxSignalBackward<S> k{};
  k.rows = p.B;
  k.vocab = p.V;
  k.signal = row;
  k.logits = rows(held, 0);
  k.targets = chosen_at(t);
  k.loss_bar = loss_bar(t);
  k.u_bar = rows(held, 1);
  k.u = rows(held, 0);
  k.scratch = scratch();
  kernels.softmax_signal_backward(launch, k);
  decode_back.multiply(p.B, rows(held, 1), top_bar);
  if (!own.weight.defined() && !own.bias.defined()) return;
  // W_bar = u^T gradient_bar + l_bar^T top
  copy_rows(states_held(held, 0), gradient_bar);
  copy_rows(states_held(held, 1), top);
  if (++held == rows.tensor().size(0)) flush_backward();
}

template <typename S>
void OnePrediction<S>::flush_backward() {
  const at::Tensor u = rows.tensor().narrow(0, 0, held);  // [held,2,B,V]
  if (own.weight.defined())
    add_outer<S>(own.weight, u.view({2 * held * p.B, p.V}),
                 states_held.tensor().narrow(0, 0, held).view({2 * held * p.B, p.H}));
  if (own.bias.defined()) own.bias.add_(u.select(1, 1).sum(at::IntArrayRef{0, 1}));
  held = 0;
}

template <typename S>
void OnePrediction<S>::finish_backward() {
  if (held > 0) flush_backward();
  if (!p.ensemble) return;
  const double share = 1.0 / p.decoders.size();
  if (own.weight.defined()) wanted.weight.add_(own.weight, share);  // [K,V,H] += [V,H]
  if (own.bias.defined()) wanted.bias.add_(own.bias, share);
}

}  // namespace

template <typename S>
std::unique_ptr<Signal<S>> make_one_prediction(const Problem& problem) {
  return std::make_unique<OnePrediction<S>>(problem);
}

template std::unique_ptr<Signal<float>> make_one_prediction(const Problem&);
template std::unique_ptr<Signal<double>> make_one_prediction(const Problem&);

}  // namespace fused_recoder
