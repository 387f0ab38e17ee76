// A gold signal, word by word: its token is not known yet, so it predicts first and has its
// gradient later, when the token arrives as the next word. Used by ops/reader.cpp.
#pragma once

#include "decoded.h"

namespace fused_recoder {

template <typename S>
class DeferredGold final : public DecodedSignal<S> {
 public:
  using typename DecodedSignal<S>::A;
  using typename DecodedSignal<S>::TopGradient;
  using typename Signal<S>::Forward;
  using typename Signal<S>::Backward;
  using Signal<S>::p;
  using Signal<S>::kernels;
  using Signal<S>::launch;

  explicit DeferredGold(const Problem& problem) : DecodedSignal<S>(problem) {}

  void begin_forward(const Forward& pass) override;
  void begin_backward(const Backward&) override;

  // Log probabilities [B,V] of the next token.
  at::Tensor predict(const S* top);
  // [B] to be filled in before the gradient is asked for.
  const at::Tensor& gold_tokens() const { return gold.tensor(); }

 private:
  TopGradient top_gradient(int64_t t, const S* top, A* delta) override;
  void value(int64_t t, const S* top, A* delta) override;
  const LinearMap& decoder() const { return p.decoders[0]; }
  SoftmaxSignal<S> softmax(const RowSignal& signal, A* rows, A* delta) const;
  void stream(const S* top) const;

  ConstantMatrix<S> decode, decode_back;
  Buffer<A> logits;         // [B,V]
  Buffer<A> probabilities;  // [B,V]
  Buffer<A> trial_logits;   // [B,V]
  Buffer<A> log_sum;        // [B]
  Buffer<A> expected, dh;   // [B,H]
  Buffer<A> scale;          // [B]
  Buffer<A> stream_scratch;
  Buffer<uint8_t> scratch;  // of softmax_signal
  Buffer<int64_t> gold;     // [B]
};

}  // namespace fused_recoder
