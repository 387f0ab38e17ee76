#include "loss.h"

#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>

namespace fused_recoder {

int64_t loss_chunk_rows(int64_t vocab, int64_t at_least, int64_t total) {
  // A weight's gradient is read and written once per chunk, which pays from some hundred rows on:
  // where the vocabulary is large, more memory is spent on them.
  constexpr int64_t million = int64_t(1) << 20, enough = 256;
  const int64_t rows = std::max(6 * million / vocab, std::min(enough, 16 * million / vocab));
  return std::min(std::max(rows, at_least), total);
}

LossGradients zero_decoder_gradients(const Problem& p) {
  LossGradients zeros;
  std::vector<int64_t> shape = {int64_t(p.decoders.size()), p.V, p.H};
  if (!p.ensemble) shape.erase(shape.begin());
  zeros.weight = at::zeros(shape, p.accum());
  shape.pop_back();
  if (p.decoders[0].bias.defined()) zeros.bias = at::zeros(shape, p.accum());
  return zeros;
}

template <typename S>
void add_decoder_gradients(const LossGradients& gradients, const at::Tensor& directions,
                           const at::Tensor& states) {
  if (gradients.weight.defined()) add_outer<S>(gradients.weight, directions, states);
  if (!gradients.bias.defined()) return;
  at::Tensor sum =
      gradients.bias_sum.defined() ? gradients.bias_sum : gradients.bias.new_empty({0});
  at::sum_out(sum, directions, at::IntArrayRef{0});
  gradients.bias.add_(sum);
}

namespace {

// Log probabilities [N] of the targets [N] under one decoder, and the gradients of
// -sum(weight * log p). `weigh` turns a chunk's log p into its rows' weights; it sees whole groups
// of `group` rows. States of the gradients are added to if `add_states`.
template <typename S, typename Weigh>
void decode_rows(const Problem& s, const LinearMap& decoder, const at::Tensor& states,
                 const at::Tensor& targets, int64_t group, const at::Tensor& log_p,
                 const Weigh& weigh, const LossGradients& gradients, bool add_states) {
  using A = typename AccumulateIn<S>::type;
  const Kernels<S>& kernels = kernels_for<S>(states.device());
  const Launch launch = launch_on(states.device());
  const int64_t N = states.size(0);
  const int64_t chunk = std::max<int64_t>(loss_chunk_rows(s.V, 1, N) / group, 1) * group;
  const int64_t chunks = (N + chunk - 1) / chunk;
  const Buffer<A> buffer({chunk, s.V}, log_p.options()), delta({chunk}, log_p.options());
  const Buffer<uint8_t> scratch = softmax_scratch(kernels, chunk, s.V, states.device());
  const ConstantMatrix<S> decode(decoder.weight, true, chunks, chunk);
  ConstantMatrix<S> decode_back;
  if (gradients.states.defined())
    decode_back = ConstantMatrix<S>(decoder.weight, false, chunks, chunk);
  const A* bias = decoder.bias.defined() ? decoder.bias.const_data_ptr<A>() : nullptr;
  for (int64_t start = 0; start < N; start += chunk) {
    const int64_t rows = std::min(chunk, N - start);
    const at::Tensor part = buffer.tensor().narrow(0, 0, rows);
    const at::Tensor x = states.narrow(0, start, rows);
    const at::Tensor part_log_p = log_p.narrow(0, start, rows);
    decode.multiply(rows, x.const_data_ptr<S>(), buffer(), bias);
    SoftmaxSignal<S> p{};
    p.rows = rows;
    p.vocab = s.V;
    p.signal = {SignalKind::kNll};
    p.logits = buffer();
    p.targets = targets.const_data_ptr<int64_t>() + start;
    p.direction = gradients.any() ? part.mutable_data_ptr<S>() : nullptr;
    p.delta = delta();
    p.log_p = part_log_p.mutable_data_ptr<A>();
    p.scratch = rows == chunk ? scratch() : nullptr;  // fewer rows may be split into more blocks
    kernels.softmax_signal(launch, p);
    if (!gradients.any()) continue;
    const at::Tensor weights = weigh(start, rows, part_log_p);  // [rows] or undefined: 1
    if (weights.defined()) part.mul_(weights.unsqueeze(1));
    if (gradients.states.defined())
      decode_back.multiply(rows, part.const_data_ptr<S>(),
                           gradients.states.mutable_data_ptr<A>() + start * s.H, nullptr,
                           add_states);
    add_decoder_gradients<S>(gradients, part, x);
  }
}

// log(mean_k p_k) from log p_k along `dim`
at::Tensor log_mean(const at::Tensor& log_p, int64_t dim) {
  return at::logsumexp(log_p, dim) - std::log(double(log_p.size(dim)));
}

LossGradients of_member(const LossGradients& gradients, int64_t k) {
  const auto member = [&](const at::Tensor& t) { return t.defined() ? t[k] : t; };
  return {gradients.states, member(gradients.weight), member(gradients.bias), {}};
}

at::Tensor flat_states(const Problem& s, const at::Tensor& states) {
  return states.view({s.T * s.R, s.H});
}

LossGradients flat(const Problem& s, LossGradients gradients) {
  if (gradients.states.defined()) gradients.states = gradients.states.view({s.T * s.R, s.H});
  return gradients;
}

at::Tensor row_targets(const Problem& s) {  // [T*R]
  return s.targets.repeat({1, s.R / s.B}).flatten();
}

}  // namespace

template <typename S>
Losses sequence_loss(const Problem& s, const at::Tensor& states, const LossGradients& gradients) {
  const at::TensorOptions accum = s.h0.options();
  const at::Tensor x = flat_states(s, states), targets = row_targets(s);
  const LossGradients out = flat(s, gradients);
  const auto unweighted = [](int64_t, int64_t, const at::Tensor&) { return at::Tensor(); };
  const at::Tensor ignored = s.targets == kIgnoreTarget;
  if (s.ensemble) {
    const int64_t K = s.decoders.size();
    const at::Tensor log_p = at::empty({K, s.T * s.B}, accum);
    for (int64_t k = 0; k < K; ++k)
      decode_rows<S>(s, s.decoders[k], x, targets, 1, log_p[k], unweighted, of_member(out, k),
                     k > 0);
    for (const at::Tensor& sum : {out.states, out.weight, out.bias})
      if (sum.defined()) sum.mul_(1.0 / K);
    const at::Tensor member_log_p = log_p.view({K, s.T, s.B});
    at::Tensor nll;
    if (s.spec.mean_logits) {
      const at::Tensor mean_log_p = at::empty({s.T * s.B}, accum);
      decode_rows<S>(s, s.mean_decoder(), x, targets, 1, mean_log_p, unweighted, {}, false);
      nll = -mean_log_p.view({s.T, s.B});
    } else {
      nll = -log_mean(member_log_p, 0);
    }
    return {nll.masked_fill_(ignored, 0), -member_log_p.mean(0), member_log_p};
  }
  const at::Tensor log_p = at::empty({s.T * s.R}, accum);
  if (s.R == s.B) {
    decode_rows<S>(s, s.decoders[0], x, targets, 1, log_p, unweighted, out, false);
    const at::Tensor nll = log_p.neg_().view({s.T, s.B});
    return {nll, nll, {}};
  }
  // The prediction is the mean of K softmaxes: a sample counts as much as it explains the target.
  const int64_t K = s.R / s.B;
  const auto responsibility = [&](int64_t, int64_t rows, const at::Tensor& part) {
    return at::softmax(part.view({rows / s.R, K, s.B}), 1).view({rows});
  };
  decode_rows<S>(s, s.decoders[0], x, targets, s.R, log_p, responsibility, out, false);
  const at::Tensor nll =
      log_mean(log_p.view({s.T, K, s.B}), 1).neg_().masked_fill_(ignored, 0);  // [T,B]
  return {nll, nll, {}};
}

template <typename S>
void weighted_loss_gradients(const Problem& s, const at::Tensor& states,
                             const at::Tensor& member_log_p, const at::Tensor& objective_bar,
                             const at::Tensor& nll_bar, const LossGradients& gradients) {
  const at::TensorOptions accum = s.h0.options();
  const at::Tensor x = flat_states(s, states), targets = row_targets(s);
  const LossGradients out = flat(s, gradients);
  const at::Tensor log_p = at::empty({s.T * s.R}, accum);
  const auto weighted_by = [](const at::Tensor& weights) {  // [T*R]
    return [=](int64_t start, int64_t rows, const at::Tensor&) {
      return weights.narrow(0, start, rows);
    };
  };
  if (!s.ensemble) {
    at::Tensor bar = objective_bar;
    if (nll_bar.defined()) bar = bar.defined() ? bar + nll_bar : nll_bar;
    const int64_t K = s.R / s.B;
    const at::Tensor weights = bar.unsqueeze(1).expand({s.T, K, s.B}).reshape({s.T * s.R});
    if (K == 1) {
      decode_rows<S>(s, s.decoders[0], x, targets, 1, log_p, weighted_by(weights), out, false);
      return;
    }
    const auto responsibility = [&](int64_t start, int64_t rows, const at::Tensor& part) {
      const at::Tensor share = at::softmax(part.view({rows / s.R, K, s.B}), 1).view({rows});
      return share * weights.narrow(0, start, rows);
    };
    decode_rows<S>(s, s.decoders[0], x, targets, s.R, log_p, responsibility, out, false);
    return;
  }
  const int64_t K = s.decoders.size();
  const bool through_members = nll_bar.defined() && !s.spec.mean_logits;
  const at::Tensor shares = through_members ? at::softmax(member_log_p, 0) : at::Tensor();
  bool add_states = false;
  for (int64_t k = 0; k < K; ++k) {
    at::Tensor weights;  // [T,B]
    if (objective_bar.defined()) weights = objective_bar / double(K);
    if (through_members)
      weights = weights.defined() ? weights + shares[k] * nll_bar : shares[k] * nll_bar;
    if (!weights.defined()) break;
    decode_rows<S>(s, s.decoders[k], x, targets, 1, log_p, weighted_by(weights.flatten()),
                   of_member(out, k), add_states);
    add_states = true;
  }
  if (!nll_bar.defined() || through_members) return;
  LossGradients of_mean{out.states, {}, {}, {}};
  if (out.weight.defined()) of_mean.weight = at::zeros_like(s.decoders[0].weight);
  if (out.bias.defined()) of_mean.bias = at::zeros_like(s.decoders[0].bias);
  decode_rows<S>(s, s.mean_decoder(), x, targets, 1, log_p, weighted_by(nll_bar.flatten()), of_mean,
                 add_states);
  if (out.weight.defined()) out.weight.add_(of_mean.weight, 1.0 / K);
  if (out.bias.defined()) out.bias.add_(of_mean.bias, 1.0 / K);
}

#define FR_INSTANTIATE(S)                                                                        \
  template void add_decoder_gradients<S>(const LossGradients&, const at::Tensor&,                \
                                         const at::Tensor&);                                     \
  template Losses sequence_loss<S>(const Problem&, const at::Tensor&, const LossGradients&);     \
  template void weighted_loss_gradients<S>(const Problem&, const at::Tensor&, const at::Tensor&, \
                                           const at::Tensor&, const at::Tensor&,                 \
                                           const LossGradients&);
FR_INSTANTIATE(float)
FR_INSTANTIATE(double)
#undef FR_INSTANTIATE

}  // namespace fused_recoder
