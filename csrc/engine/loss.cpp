#include "loss.h"

#include <algorithm>

namespace fused_recoder {

int64_t loss_chunk_rows(int64_t vocab, int64_t at_least, int64_t total) {
  return std::min(std::max((int64_t(6) << 20) / vocab, at_least), total);
}

template <typename S>
void add_decoder_gradients(const LossGradients& gradients, const at::Tensor& directions,
                           const at::Tensor& states) {
  if (gradients.weight.defined()) add_outer<S>(gradients.weight, directions, states);
  if (gradients.bias.defined()) gradients.bias.add_(directions.sum(0));
}

template <typename S>
void decoder_loss(const Sequence& s, const at::Tensor& states, const at::Tensor& targets,
                  const at::Tensor& weights, const at::Tensor& nll,
                  const LossGradients& gradients) {
  using A = typename AccumulateIn<S>::type;
  const Kernels<S>& kernels = kernels_for<S>(states.device());
  const Launch launch = launch_on(states.device());
  const int64_t N = states.size(0);
  const int64_t chunk = loss_chunk_rows(s.V, 1, N);
  const bool backward =
      gradients.states.defined() || gradients.weight.defined() || gradients.bias.defined();
  const Buffer<A> buffer({chunk, s.V}, nll.options());
  const ConstantMatrix<S> decode(s.decoder_weight, true, (N + chunk - 1) / chunk, chunk);
  ConstantMatrix<S> decode_back;
  if (gradients.states.defined())
    decode_back = ConstantMatrix<S>(s.decoder_weight, false, (N + chunk - 1) / chunk, chunk);
  const A* bias = s.decoder_bias.defined() ? s.decoder_bias.const_data_ptr<A>() : nullptr;
  for (int64_t start = 0; start < N; start += chunk) {
    const int64_t rows = std::min(chunk, N - start);
    const at::Tensor part = buffer.tensor().narrow(0, 0, rows);
    const at::Tensor x = states.narrow(0, start, rows);
    decode.multiply(rows, x.const_data_ptr<S>(), buffer(), bias);
    SoftmaxSignal<S> p{};
    p.rows = rows;
    p.vocab = s.V;
    p.kind = SignalKind::kNll;
    p.logits = buffer();
    p.targets = targets.const_data_ptr<int64_t>() + start;
    p.direction = backward ? part.mutable_data_ptr<S>() : nullptr;
    p.delta = nll.mutable_data_ptr<A>() + start;
    kernels.softmax_signal(launch, p);
    if (!backward) continue;
    if (weights.defined()) part.mul_(weights.narrow(0, start, rows).unsqueeze(1));
    if (gradients.states.defined())
      decode_back.multiply(rows, part.const_data_ptr<S>(),
                           gradients.states.mutable_data_ptr<A>() + start * s.H);
    add_decoder_gradients<S>(gradients, part, x);
  }
}

template void add_decoder_gradients<float>(const LossGradients&, const at::Tensor&,
                                           const at::Tensor&);
template void add_decoder_gradients<double>(const LossGradients&, const at::Tensor&,
                                            const at::Tensor&);
template void decoder_loss<float>(const Sequence&, const at::Tensor&, const at::Tensor&,
                                  const at::Tensor&, const at::Tensor&, const LossGradients&);
template void decoder_loss<double>(const Sequence&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const LossGradients&);

}  // namespace fused_recoder
