#include "mixture.h"

#include <ATen/ops/ones.h>

#include <algorithm>

namespace fused_recoder {
namespace {

// Elements of logits held at a time by the backward pass, twice: 16 MB of float each.
constexpr int64_t kBackwardLogits = int64_t(4) << 20;

}  // namespace

template <typename S>
void Mixture<S>::begin_forward(const Forward& pass) {
  DecodedSignal<S>::begin_forward(pass);
  block = std::clamp<int64_t>(logits_held / (K * p.V), 1, p.B);
  // Blocks of equal size.
  block = (p.B + (p.B + block - 1) / block - 1) / ((p.B + block - 1) / block);
  logits = Buffer<A>({K, block, p.V}, p.accum());
  log_mean = Buffer<A>({block, p.V}, p.accum());
  dh = Buffer<A>({p.R, p.H}, p.accum());
  prepare_forward();
}

template <typename S>
typename Mixture<S>::TopGradient Mixture<S>::top_gradient(int64_t t, const S* top, A* delta) {
  for (int64_t b = 0; b < p.B; b += block) {
    const int64_t rows = std::min(block, p.B - b);
    decode(t, top, b, rows);
    mixture(rows, delta + b, /*direction=*/true);
    decode_back(t, b, rows);
  }
  return {dh(), nullptr};
}

template <typename S>
void Mixture<S>::value(int64_t t, const S* top, A* delta) {
  for (int64_t b = 0; b < p.B; b += block) {
    const int64_t rows = std::min(block, p.B - b);
    decode(t, top, b, rows);
    mixture(rows, delta + b, /*direction=*/false);
  }
}

template <typename S>
void Mixture<S>::mixture(int64_t rows, A* delta, bool direction) {
  MixtureSignal<S> k{};
  k.samples = K;
  k.rows = rows;
  k.vocab = p.V;
  k.logits = logits();
  k.direction = direction ? logits() : nullptr;
  k.log_mean = log_mean();
  k.delta = delta;
  complete(k);
  kernels.mixture_signal(launch, k);
}

template <typename S>
MaskRows<S> Mixture<S>::mask_at(int64_t t) const {
  MaskRows<S> mask{};
  mask.units = p.H;
  mask.dropout = p.sample_dropout();
  mask.time = time(t);
  return mask;
}

template <typename S>
void Mixture<S>::begin_backward(const Backward& pass) {
  wanted = pass.decoder;
  block = std::clamp<int64_t>(kBackwardLogits / (K * p.V), 1, p.B);
  logits = Buffer<A>({K, block, p.V}, p.accum());
  bars = Buffer<A>({K, block, p.V}, p.accum());
  log_mean = Buffer<A>({block, p.V}, p.accum());
  slope = Buffer<A>({block, p.V}, p.accum());
  prepare_backward();
}

template <typename S>
void Mixture<S>::curvature(int64_t t, const S* top, const S* gradient_bar, A* top_bar) {
  const at::Tensor x = this->rows_at(top), v = this->rows_at(gradient_bar);  // [R,H]
  const at::Tensor out = tensor_at(top_bar, {p.R, p.H}, p.device()).zero_();
  for (int64_t b = 0; b < p.B; b += block) {
    const int64_t rows = std::min(block, p.B - b);
    draw_masks(t, b, rows);
    for (int64_t k = 0; k < K; ++k) {
      decode_sample(k, of_sample(x, k, b, rows), logits() + k * rows * p.V, true);
      decode_sample(k, of_sample(v, k, b, rows), bars() + k * rows * p.V, false);
    }
    kernels.mixture_signal_backward(
        launch, MixtureSignalBackward<S>{K, rows, p.V, logits(), bars(), log_mean(), slope()});
    for (int64_t k = 0; k < K; ++k) {
      const at::Tensor u = block_of(logits, k, rows), l_bar = block_of(bars, k, rows);
      decode_sample_back(k, l_bar, of_sample(out, k, b, rows));
      add_to_decoder(k, u, l_bar, of_sample(v, k, b, rows), of_sample(x, k, b, rows));
    }
  }
}

template <typename S>
void Mixture<S>::add_to_decoder(int64_t k, const at::Tensor& u, const at::Tensor& l_bar,
                                const at::Tensor& v, const at::Tensor& x) {
  if (wanted.weight.defined()) {
    collect(k, u, v);
    collect(k, l_bar, x);
  }
  if (!wanted.bias.defined()) return;
  const at::Tensor bias = p.ensemble ? wanted.bias[k] : wanted.bias;
  bias.add_(l_bar.sum(0));
}

template <typename S>
void UnitMaskedMixture<S>::prepare_backward() {
  const at::Tensor& weight = p.decoders[0].weight;
  sample_to_vocab = ConstantMatrix<S>(p.precision, weight, true, 2 * K * p.T, this->block);
  sample_to_hidden = ConstantMatrix<S>(p.precision, weight, false, K * p.T, this->block);
  ones = at::ones({this->block, p.H}, p.storage());
  back = at::empty({this->block, p.H}, p.accum());
}

template <typename S>
void UnitMaskedMixture<S>::draw_masks(int64_t t, int64_t b, int64_t rows) {
  masks = at::empty({K, shared ? 1 : rows, p.H}, p.storage());
  MaskRows<S> mask = this->mask_at(t);
  mask.samples = K;
  mask.rows = masks.size(1);
  mask.first_row = static_cast<uint32_t>(shared ? 0 : b);
  mask.in = ones.template const_data_ptr<S>();
  mask.out = masks.template mutable_data_ptr<S>();
  this->kernels.mask_rows(this->launch, mask);
}

template <typename S>
void UnitMaskedMixture<S>::decode_sample(int64_t k, const at::Tensor& x, A* out, bool with_bias) {
  const at::Tensor masked = x * masks[k];
  sample_to_vocab.multiply(x.size(0), masked.template const_data_ptr<S>(), out,
                           with_bias ? this->bias() : nullptr);
}

template <typename S>
void UnitMaskedMixture<S>::decode_sample_back(int64_t k, const at::Tensor& l_bar,
                                              const at::Tensor& top_bar) {
  const int64_t rows = l_bar.size(0);
  sample_to_hidden.multiply(rows, l_bar.template const_data_ptr<S>(),
                            back.template mutable_data_ptr<A>());
  top_bar.addcmul_(back.narrow(0, 0, rows), masks[k]);
}

template <typename S>
void UnitMaskedMixture<S>::collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) {
  add_outer<S>(p.precision, this->wanted.weight, directions, x * masks[k]);
}

template class Mixture<float>;
template class Mixture<double>;
template class UnitMaskedMixture<float>;
template class UnitMaskedMixture<double>;

}  // namespace fused_recoder
