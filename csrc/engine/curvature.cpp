#include "curvature.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace fused_recoder {
namespace {

// Elements of logits held at a time by a mixture, twice: 16 MB of float each.
constexpr int64_t kLogits = int64_t(4) << 20;

template <typename A>
const A* bias_of(const LinearMap& decoder) {
  return decoder.bias.defined() ? decoder.bias.const_data_ptr<A>() : nullptr;
}

// nll, surprisal, entropy, mean logits: the logits are made again, next to the cotangent of u.
template <typename S>
class OneDecoder final : public SignalCurvature<S> {
  using A = typename AccumulateIn<S>::type;

 public:
  OneDecoder(const Sequence& sequence, const LossGradients& gradients, const at::Tensor& chosen,
             const at::Tensor& loss_bar)
      : s(sequence),
        wanted(gradients),
        kernels(kernels_for<S>(s.input.device())),
        launch(launch_on(s.input.device())),
        decoder(s.ensemble ? s.mean_decoder() : s.decoders[0]),
        decode(decoder.weight, true, s.T, 2 * s.B),
        decode_back(decoder.weight, false, s.T, s.B),
        chosen(chosen),
        loss_bar(loss_bar),
        steps(loss_chunk_rows(s.V, 2 * s.B, 2 * s.T * s.B) / (2 * s.B)),
        input({2, s.B, s.H}, s.input.options()),
        scratch(softmax_scratch(kernels, s.B, s.V, s.h0.device())),
        rows({steps, 2, s.B, s.V}, s.h0.options()),
        states({steps, 2, s.B, s.H}, s.input.options()) {
    own = gradients;
    if (s.ensemble && own.weight.defined()) own.weight = at::zeros_like(decoder.weight);
    if (s.ensemble && own.bias.defined()) own.bias = at::zeros_like(decoder.bias);
  }

  void backward(int64_t t, const S* top, const S* gradient_bar, A* top_bar) override {
    copy(input(0), top);
    copy(input(1), gradient_bar);
    // The logits once more, and the cotangent of u: W is read once for both.
    decode.multiply(2 * s.B, input(), rows(held));
    if (decoder.bias.defined()) rows.tensor()[held][0].add_(decoder.bias);
    SoftmaxSignalBackward<S> p{};
    p.rows = s.B;
    p.vocab = s.V;
    p.kind = s.ensemble ? SignalKind::kEntropy : s.options.signal;
    p.logits = rows(held, 0);
    p.targets = chosen(t);
    p.loss_bar = loss_bar(t);
    p.u_bar = rows(held, 1);
    p.u = rows(held, 0);
    p.scratch = scratch();
    kernels.softmax_signal_backward(launch, p);
    decode_back.multiply(s.B, rows(held, 1), top_bar);
    if (!own.weight.defined() && !own.bias.defined()) return;
    // W_bar = u^T gradient_bar + l_bar^T top
    copy(states(held, 0), gradient_bar);
    copy(states(held, 1), top);
    if (++held == steps) flush();
  }

  void finish() override {
    if (held > 0) flush();
    if (!s.ensemble) return;
    const double share = 1.0 / s.decoders.size();
    if (own.weight.defined()) wanted.weight.add_(own.weight, share);  // [K,V,H] += [V,H]
    if (own.bias.defined()) wanted.bias.add_(own.bias, share);
  }

 private:
  void copy(S* to, const S* from) const {
    const auto wrap = [&](const S* p) {
      return tensor_at(const_cast<S*>(p), {s.B, s.H}, s.input.device());
    };
    wrap(to).copy_(wrap(from));
  }

  void flush() {
    const at::Tensor u = rows.tensor().narrow(0, 0, held);  // [held,2,B,V]
    if (own.weight.defined())
      add_outer<S>(own.weight, u.view({2 * held * s.B, s.V}),
                   states.tensor().narrow(0, 0, held).view({2 * held * s.B, s.H}));
    if (own.bias.defined()) own.bias.add_(u.select(1, 1).sum(at::IntArrayRef{0, 1}));
    held = 0;
  }

  const Sequence& s;
  const LossGradients wanted;
  LossGradients own;  // of the one decoder
  const Kernels<S>& kernels;
  const Launch launch;
  const LinearMap decoder;
  const ConstantMatrix<S> decode, decode_back;
  const Buffer<int64_t> chosen;  // [T,B] or absent
  const Buffer<A> loss_bar;      // [T,B] or absent
  const int64_t steps;           // held for one update of the decoder's gradient
  int64_t held = 0;
  Buffer<S> input;          // [2,B,H]
  Buffer<uint8_t> scratch;  // of softmax_signal_backward
  Buffer<A> rows;           // [steps,2,B,V] logits and u_bar, then u and l_bar
  Buffer<S> states;         // [steps,2,B,H]
};

// The mean of K predictions, for blocks of instances.
template <typename S>
class Mixture : public SignalCurvature<S> {
 protected:
  using A = typename AccumulateIn<S>::type;

 public:
  Mixture(const Sequence& sequence, const LossGradients& gradients)
      : s(sequence),
        wanted(gradients),
        K(s.options.samples),
        kernels(kernels_for<S>(s.input.device())),
        launch(launch_on(s.input.device())) {
    block = std::clamp<int64_t>(kLogits / (K * s.V), 1, s.B);
    logits = Buffer<A>({K, block, s.V}, s.h0.options());
    bars = Buffer<A>({K, block, s.V}, s.h0.options());
    log_mean = Buffer<A>({block, s.V}, s.h0.options());
    slope = Buffer<A>({block, s.V}, s.h0.options());
  }

  void backward(int64_t t, const S* top, const S* gradient_bar, A* top_bar) final {
    const at::Tensor x = wrap(top), v = wrap(gradient_bar);  // [R,H]
    const at::Tensor out = tensor_at(top_bar, {s.R, s.H}, s.h0.device()).zero_();
    for (int64_t b = 0; b < s.B; b += block) {
      const int64_t rows = std::min(block, s.B - b);
      prepare(t, b, rows);
      for (int64_t k = 0; k < K; ++k) {
        decode(k, of_sample(x, k, b, rows), logits() + k * rows * s.V, true);
        decode(k, of_sample(v, k, b, rows), bars() + k * rows * s.V, false);
      }
      kernels.mixture_signal_backward(
          launch, MixtureSignalBackward<S>{K, rows, s.V, logits(), bars(), log_mean(), slope()});
      for (int64_t k = 0; k < K; ++k) {
        const at::Tensor u = block_of(logits, k, rows), l_bar = block_of(bars, k, rows);
        decode_back(k, l_bar, of_sample(out, k, b, rows));
        if (wanted.weight.defined()) {
          collect(k, u, of_sample(v, k, b, rows));
          collect(k, l_bar, of_sample(x, k, b, rows));
        }
        if (wanted.bias.defined()) {
          const at::Tensor bias = s.options.ensemble() ? wanted.bias[k] : wanted.bias;
          bias.add_(l_bar.sum(0));
        }
      }
    }
  }

 protected:
  // Masks of the instances [b, b + rows) at step t.
  virtual void prepare(int64_t, int64_t, int64_t) {}
  // x [rows,H] -> out [rows,V]
  virtual void decode(int64_t k, const at::Tensor& x, A* out, bool with_bias) = 0;
  // Adds to top_bar [rows,H] what l_bar [rows,V] gives.
  virtual void decode_back(int64_t k, const at::Tensor& l_bar, const at::Tensor& top_bar) = 0;
  // Adds directions^T [V,rows] * x [rows,H] to the gradient of the weight.
  virtual void collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) = 0;

  // The rows of a state tensor [R,H] that sample k reads of the instances [b, b + rows).
  at::Tensor of_sample(const at::Tensor& states, int64_t k, int64_t b, int64_t rows) const {
    return states.narrow(0, (s.R == s.B ? 0 : k * s.B) + b, rows);
  }
  at::Tensor block_of(const Buffer<A>& buffer, int64_t k, int64_t rows) const {  // [rows,V]
    return tensor_at(buffer() + k * rows * s.V, {rows, s.V}, s.h0.device());
  }
  at::Tensor wrap(const S* states) const {
    return tensor_at(const_cast<S*>(states), {s.R, s.H}, s.input.device());
  }
  MaskRows<S> mask(int64_t t) const {
    MaskRows<S> p{};
    p.units = s.H;
    p.dropout = s.sample_dropout();
    p.time = static_cast<uint32_t>(s.options.time + t);
    return p;
  }

  const Sequence& s;
  const LossGradients wanted;
  const int64_t K;
  const Kernels<S>& kernels;
  const Launch launch;
  int64_t block;              // instances at a time
  Buffer<A> logits, bars;     // [K,block,V] (as [K,rows,V])
  Buffer<A> log_mean, slope;  // [block,V]
};

// MC Dropout with masks of units, one per instance or one for all.
template <typename S>
class MaskedUnits final : public Mixture<S> {
  using typename Mixture<S>::A;
  using Mixture<S>::s;
  using Mixture<S>::K;

 public:
  MaskedUnits(const Sequence& sequence, const LossGradients& gradients)
      : Mixture<S>(sequence, gradients),
        to_vocab(s.decoders[0].weight, true, 2 * K * s.T, this->block),
        to_hidden(s.decoders[0].weight, false, K * s.T, this->block),
        ones(at::ones({this->block, s.H}, s.input.options())),
        back(at::empty({this->block, s.H}, s.h0.options())) {}

 private:
  void prepare(int64_t t, int64_t b, int64_t rows) override {
    const bool shared = s.options.mixture == MixtureKind::kSharedMasks;
    masks = at::empty({K, shared ? 1 : rows, s.H}, s.input.options());
    MaskRows<S> p = this->mask(t);
    p.samples = K;
    p.rows = masks.size(1);
    p.first_row = static_cast<uint32_t>(shared ? 0 : b);
    p.in = ones.template const_data_ptr<S>();
    p.out = masks.template mutable_data_ptr<S>();
    this->kernels.mask_rows(this->launch, p);
  }
  void decode(int64_t k, const at::Tensor& x, A* out, bool with_bias) override {
    const at::Tensor masked = x * masks[k];
    to_vocab.multiply(x.size(0), masked.template const_data_ptr<S>(), out,
                      with_bias ? bias_of<A>(s.decoders[0]) : nullptr);
  }
  void decode_back(int64_t k, const at::Tensor& l_bar, const at::Tensor& top_bar) override {
    const int64_t rows = l_bar.size(0);
    to_hidden.multiply(rows, l_bar.template const_data_ptr<S>(),
                       back.template mutable_data_ptr<A>());
    top_bar.addcmul_(back.narrow(0, 0, rows), masks[k]);
  }
  void collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) override {
    add_outer<S>(this->wanted.weight, directions, x * masks[k]);
  }

  const ConstantMatrix<S> to_vocab, to_hidden;
  const at::Tensor ones, back;  // [block,H]
  at::Tensor masks;             // [K, rows or 1, H]
};

// MC Dropout with masks of weights.
template <typename S>
class MaskedWeights final : public Mixture<S> {
  using typename Mixture<S>::A;
  using Mixture<S>::s;

 public:
  MaskedWeights(const Sequence& sequence, const LossGradients& gradients)
      : Mixture<S>(sequence, gradients), masked(at::empty_like(s.decoders[0].weight)) {}

 private:
  void prepare(int64_t t, int64_t, int64_t) override { time = t; }
  void decode(int64_t k, const at::Tensor& x, A* out, bool with_bias) override {
    apply_mask(k, s.decoders[0].weight, masked);
    ConstantMatrix<S>(masked, true, 1, 1)
        .multiply(x.size(0), x.template const_data_ptr<S>(), out,
                  with_bias ? bias_of<A>(s.decoders[0]) : nullptr);
  }
  void decode_back(int64_t k, const at::Tensor& l_bar, const at::Tensor& top_bar) override {
    apply_mask(k, s.decoders[0].weight, masked);
    ConstantMatrix<S>(masked, false, 1, 1)
        .multiply(l_bar.size(0), l_bar.template const_data_ptr<S>(),
                  top_bar.template mutable_data_ptr<A>(), nullptr, /*accumulate=*/true);
  }
  void collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) override {
    masked.zero_();
    add_outer<S>(masked, directions, x);
    apply_mask(k, masked, masked);
    this->wanted.weight.add_(masked);
  }
  void apply_mask(int64_t k, const at::Tensor& from, const at::Tensor& to) const {
    MaskRows<S> p = this->mask(time);
    p.samples = 1;
    p.rows = s.V;
    p.first_sample = static_cast<uint32_t>(k);
    p.in = from.template const_data_ptr<S>();
    p.out = to.template mutable_data_ptr<S>();
    this->kernels.mask_rows(this->launch, p);
  }

  const at::Tensor masked;  // [V,H]
  int64_t time = 0;
};

// K decoders of one state, or one decoder of K states.
template <typename S>
class Heads final : public Mixture<S> {
  using typename Mixture<S>::A;
  using Mixture<S>::s;

 public:
  Heads(const Sequence& sequence, const LossGradients& gradients)
      : Mixture<S>(sequence, gradients) {
    for (const LinearMap& decoder : s.decoders) {
      to_vocab.emplace_back(decoder.weight, true, 2 * s.T, this->block);
      to_hidden.emplace_back(decoder.weight, false, s.T, this->block);
    }
  }

 private:
  int64_t decoder(int64_t k) const { return s.options.ensemble() ? k : 0; }
  void decode(int64_t k, const at::Tensor& x, A* out, bool with_bias) override {
    to_vocab[decoder(k)].multiply(x.size(0), x.template const_data_ptr<S>(), out,
                                  with_bias ? bias_of<A>(s.decoders[decoder(k)]) : nullptr);
  }
  void decode_back(int64_t k, const at::Tensor& l_bar, const at::Tensor& top_bar) override {
    to_hidden[decoder(k)].multiply(l_bar.size(0), l_bar.template const_data_ptr<S>(),
                                   top_bar.template mutable_data_ptr<A>(), nullptr,
                                   /*accumulate=*/true);
  }
  void collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) override {
    const at::Tensor& weight = this->wanted.weight;
    add_outer<S>(s.options.ensemble() ? weight[k] : weight, directions, x);
  }

  std::vector<ConstantMatrix<S>> to_vocab, to_hidden;
};

}  // namespace

template <typename S>
std::unique_ptr<SignalCurvature<S>> make_curvature(const Sequence& s,
                                                   const LossGradients& gradients,
                                                   const at::Tensor& chosen,
                                                   const at::Tensor& loss_bar) {
  if (!s.options.mixes()) return std::make_unique<OneDecoder<S>>(s, gradients, chosen, loss_bar);
  switch (s.options.mixture) {
    case MixtureKind::kUnitMasks:
    case MixtureKind::kSharedMasks:
      return std::make_unique<MaskedUnits<S>>(s, gradients);
    case MixtureKind::kWeightMasks:
      return std::make_unique<MaskedWeights<S>>(s, gradients);
    default:
      return std::make_unique<Heads<S>>(s, gradients);
  }
}

#define FR_INSTANTIATE(S)                                         \
  template std::unique_ptr<SignalCurvature<S>> make_curvature<S>( \
      const Sequence&, const LossGradients&, const at::Tensor&, const at::Tensor&);
FR_INSTANTIATE(float)
FR_INSTANTIATE(double)
#undef FR_INSTANTIATE

}  // namespace fused_recoder
