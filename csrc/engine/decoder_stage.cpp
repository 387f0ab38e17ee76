// Signals of one prediction: nll, surprisal, entropy (also that of an ensemble's mean logits, which
// are one decoder's). Two GEMMs with the decoder and one pass over
// the logits; few rows are streamed through W in one pass instead.
#include "signal_stage.h"

namespace fused_recoder {
namespace {

// W is read in one pass for up to this many rows, of gold signals as long as their gradients [B,H]
// stay in the core's cache; beyond, two GEMMs at full speed are faster. (Of the entropy one pass is
// three products.)
constexpr int64_t kStreamRows = 2, kStreamGoldRows = 64, kStreamGoldElements = 14 << 10;

template <typename S>
class DecoderStage final : public SignalStage<S> {
  using A = typename AccumulateIn<S>::type;
  using typename SignalStage<S>::Gradient;

 public:
  DecoderStage(const Sequence& sequence, const SharedLoss<S>& shared, bool values)
      : s(sequence),
        shared(shared),
        decoder(s.ensemble ? s.mean_decoder() : s.decoders[0]),
        kind(s.ensemble ? SignalKind::kEntropy : s.options.signal),
        kernels(kernels_for<S>(s.input.device())),
        launch(launch_on(s.input.device())) {
    const at::TensorOptions accum = s.h0.options();
    const bool collects = shared.gradients.weight.defined();
    const bool few = s.B <= kStreamRows || (reads_target(kind) && s.B <= kStreamGoldRows &&
                                            s.B * s.H <= kStreamGoldElements);
    const bool streams = kernels.stream_decode != nullptr && few;
    if (streams) {
      stream_scratch = Buffer<A>({kernels.stream_scratch(s.B, s.H)}, accum);
    } else {
      decode = ConstantMatrix<S>(decoder.weight, true, values ? 2 * s.T : s.T, s.B);
      decode_back = ConstantMatrix<S>(decoder.weight, false, s.T, s.B);
      scratch = softmax_scratch(kernels, s.B, s.V, accum.device());
    }
    if (collects) {
      const int64_t most = loss_chunk_rows(s.V, s.B, s.T * s.B) / s.B;
      const int64_t flushes = (s.T + most - 1) / most;
      steps_per_flush = (s.T + flushes - 1) / flushes;
    }
    if (!streams || collects || s.B > kStreamRows)
      logits = Buffer<A>({steps_per_flush, s.B, s.V}, accum);
    if (values) trial_logits = Buffer<A>({s.B, s.V}, accum);
    dh = Buffer<A>({s.B, s.H}, accum);
    scale = Buffer<A>({s.B}, accum);
    if (reads_target(kind)) {
      chosen = shared.chosen ? shared.chosen : Buffer<int64_t>({1, s.B}, accum.dtype(at::kLong));
      if (!s.options.argmax) targets = Buffer<int64_t>(s.targets);
    }
  }

  Gradient gradient(int64_t t, const S* top, A* delta) override {
    // The same direction is the gradient of the loss and, times `scale`, that of the signal.
    A* dh_top = shared.loss_grads ? shared.loss_grads(t) : dh();
    A* rows = logits(t % steps_per_flush);  // [B,V] logits, then the direction of u
    if (stream_scratch) {
      StreamDecode<S> p = stream(rows, top, targets(t), delta);
      p.direction = shared.gradients.weight.defined() ? rows : nullptr;
      p.dh = dh_top;
      p.scale = scale();
      p.log_p = shared.log_p(t);
      p.chosen = chosen_at(t);
      kernels.stream_decode(launch, p);
      flush(t + 1);
      return {dh_top, scale()};
    }
    decode.multiply(s.B, top, rows, bias());
    SoftmaxSignal<S> p = softmax(rows, targets(t), delta);
    p.direction = rows;
    p.scale = scale();
    p.log_p = shared.log_p(t);
    p.chosen = chosen_at(t);
    kernels.softmax_signal(launch, p);
    decode_back.multiply(s.B, rows, dh_top);
    flush(t + 1);
    return {dh_top, scale()};
  }

  // Of the target that the gradient was taken for.
  void value(int64_t t, const S* top, A* delta) override {
    if (stream_scratch) {
      kernels.stream_decode(launch, stream(trial_logits(), top, chosen_at(t), delta));
      return;
    }
    decode.multiply(s.B, top, trial_logits(), bias());
    kernels.softmax_signal(launch, softmax(trial_logits(), chosen_at(t), delta));
  }

 private:
  int64_t* chosen_at(int64_t t) const { return chosen(shared.chosen ? t : 0); }
  const A* bias() const {
    return decoder.bias.defined() ? decoder.bias.const_data_ptr<A>() : nullptr;
  }

  SoftmaxSignal<S> softmax(A* rows, const int64_t* tokens, A* delta) const {
    SoftmaxSignal<S> p{};
    p.rows = s.B;
    p.vocab = s.V;
    p.kind = kind;
    p.logits = rows;
    p.targets = tokens;
    p.delta = delta;
    p.scratch = scratch();
    return p;
  }

  StreamDecode<S> stream(A* rows, const S* top, const int64_t* tokens, A* delta) const {
    StreamDecode<S> p{};
    p.rows = s.B;
    p.hidden = s.H;
    p.vocab = s.V;
    p.kind = kind;
    p.h = top;
    p.weight = decoder.weight.template const_data_ptr<S>();
    p.bias = bias();
    p.targets = tokens;
    p.scratch = stream_scratch();
    p.logits = rows;
    p.delta = delta;
    return p;
  }

  // Once enough steps are collected, their rows of logits become one large GEMM.
  void flush(int64_t end) const {
    if (!shared.gradients.weight.defined()) return;
    const int64_t steps = (end - 1) % steps_per_flush + 1;
    if (steps < steps_per_flush && end < s.T) return;
    add_decoder_gradients<S>(
        shared.gradients, logits.tensor().narrow(0, 0, steps).view({steps * s.B, s.V}),
        shared.output.tensor().narrow(0, end - steps, steps).view({steps * s.B, s.H}));
  }

  const Sequence& s;
  const SharedLoss<S> shared;
  const LinearMap decoder;
  const SignalKind kind;
  const Kernels<S>& kernels;
  const Launch launch;
  ConstantMatrix<S> decode, decode_back;  // [H -> V], [V -> H]
  int64_t steps_per_flush = 1;            // steps of logits held for one update of the gradient
  Buffer<A> logits;                       // [steps,B,V]
  Buffer<A> trial_logits;                 // [B,V]
  Buffer<uint8_t> scratch;                // of softmax_signal
  Buffer<A> stream_scratch;               // present: decode in one pass over W
  Buffer<A> dh;                           // [B,H]
  Buffer<A> scale;                        // [B]
  Buffer<int64_t> targets;                // [T,B] given
  Buffer<int64_t> chosen;                 // [T or 1,B] in use
};

}  // namespace

template <typename S>
std::unique_ptr<SignalStage<S>> make_decoder_stage(const Sequence& s, const SharedLoss<S>& shared,
                                                   bool values) {
  return std::make_unique<DecoderStage<S>>(s, shared, values);
}

template std::unique_ptr<SignalStage<float>> make_decoder_stage(const Sequence&,
                                                                const SharedLoss<float>&, bool);
template std::unique_ptr<SignalStage<double>> make_decoder_stage(const Sequence&,
                                                                 const SharedLoss<double>&, bool);

}  // namespace fused_recoder
