#include "deferred_gold.h"

#include <ATen/ops/sub.h>

namespace fused_recoder {
namespace {

// Words that weights are packed for: many.
constexpr int64_t kWords = 1 << 20;

}  // namespace

template <typename S>
void DeferredGold<S>::begin_forward(const Forward& pass) {
  DecodedSignal<S>::begin_forward(pass);
  const at::TensorOptions accum = p.accum();
  const at::Tensor& weight = decoder().weight;
  logits = Buffer<A>({p.B, p.V}, accum);
  log_sum = Buffer<A>({p.B}, accum);
  expected = Buffer<A>({p.B, p.H}, accum);
  dh = Buffer<A>({p.B, p.H}, accum);
  scale = Buffer<A>({p.B}, accum);
  gold = Buffer<int64_t>({p.B}, accum.dtype(at::kLong));
  if (kernels.stream_decode != nullptr && p.B <= kStreamRows)
    stream_scratch = Buffer<A>({kernels.stream_scratch(p.B, p.H)}, accum);
  if (!stream_scratch || pass.values()) decode = ConstantMatrix<S>(weight, true, kWords, p.B);
  scratch = softmax_scratch(kernels, p.B, p.V, p.device());
  if (!stream_scratch) {
    decode_back = ConstantMatrix<S>(weight, false, kWords, p.B);
    probabilities = Buffer<A>({p.B, p.V}, accum);
  }
  if (pass.values()) trial_logits = Buffer<A>({p.B, p.V}, accum);
}

template <typename S>
void DeferredGold<S>::begin_backward(const Backward&) {
  TORCH_INTERNAL_ASSERT(false, "a reader has no backward pass");
}

template <typename S>
at::Tensor DeferredGold<S>::predict(const S* top) {
  if (stream_scratch) {
    stream(top);
  } else {
    decode.multiply(p.B, top, logits(), this->bias_of(decoder()));
    probabilities.tensor().copy_(logits.tensor());
    SoftmaxSignal<S> k = softmax({SignalKind::kSoftmax}, probabilities(), log_sum());
    k.direction = probabilities();
    kernels.softmax_signal(launch, k);
    decode_back.multiply(p.B, probabilities(), expected());
  }
  return at::sub(logits.tensor(), log_sum.tensor().unsqueeze(1));
}

template <typename S>
void DeferredGold<S>::stream(const S* top) const {
  StreamDecode<S> k{};
  k.rows = p.B;
  k.hidden = p.H;
  k.vocab = p.V;
  k.signal = {SignalKind::kSoftmax};
  k.h = top;
  k.weight = decoder().weight.template const_data_ptr<S>();
  k.bias = this->bias_of(decoder());
  k.scratch = stream_scratch();
  k.logits = logits();
  k.dh = expected();
  k.delta = log_sum();
  k.scale = scale();
  kernels.stream_decode(launch, k);
}

template <typename S>
SoftmaxSignal<S> DeferredGold<S>::softmax(const RowSignal& signal, A* rows, A* delta) const {
  SoftmaxSignal<S> k{};
  k.rows = p.B;
  k.vocab = p.V;
  k.signal = signal;
  k.logits = rows;
  k.delta = delta;
  k.scratch = scratch();
  return k;
}

template <typename S>
typename DeferredGold<S>::TopGradient DeferredGold<S>::top_gradient(int64_t, const S*, A* delta) {
  GoldArrives<S> k{};
  k.rows = p.B;
  k.hidden = p.H;
  k.vocab = p.V;
  k.signal = p.signal.row(p.spec);
  k.logits = logits();
  k.log_sum = log_sum();
  k.expected = expected();
  k.targets = gold();
  k.weight = decoder().weight.template const_data_ptr<S>();
  k.dh = dh();
  k.delta = delta;
  k.scale = scale();
  kernels.gold_arrives(launch, k);
  return {dh(), scale()};
}

template <typename S>
void DeferredGold<S>::value(int64_t, const S* top, A* delta) {
  decode.multiply(p.B, top, trial_logits(), this->bias_of(decoder()));
  SoftmaxSignal<S> k = softmax(p.signal.row(p.spec), trial_logits(), delta);
  k.targets = gold();
  kernels.softmax_signal(launch, k);
}

template class DeferredGold<float>;
template class DeferredGold<double>;

}  // namespace fused_recoder
