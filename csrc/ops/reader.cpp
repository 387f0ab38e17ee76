#include "reader.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>

#include <cmath>

#include "../cell/recoding.h"
#include "../cell/stack.h"
#include "../signals/deferred_gold.h"

namespace fused_recoder {
namespace {

// Steps that a reader's weights are packed for: many.
constexpr int64_t kSteps = 1 << 20;
template <typename S>
class TypedReader final : public StepReader {
  using A = typename AccumulateIn<S>::type;

 public:
  TypedReader(Problem problem, const at::Tensor& embedding)
      : p(std::move(problem)),
        embedding(widen(embedding)),
        states(p, /*save=*/false),
        stack(states, kSteps),
        input_mask(p.input_mask()) {
    if (p.recodes()) make_recoder();
    check_launches(p.device());  // of masks that are held for the whole text
    if (deferred != nullptr) return;
    predictors =
        p.ensemble && p.spec.mean_logits ? std::vector<LinearMap>{p.mean_decoder()} : p.decoders;
    for (const LinearMap& decoder : predictors)
      decoders.emplace_back(decoder.weight, true, kSteps, p.R);
  }

  at::Tensor feed(const at::Tensor& tokens, const OptionalTensor& labels) override {
    check_stream();
    check_tokens("tokens", tokens, embedding.size(0), false);
    if (p.signal.reads_labels) {
      TORCH_CHECK_VALUE(labels.has_value(), "labels must be given for a classifier (",
                        kIgnoreTarget, " where there is none)");
      for (const LinearMap& classifier : p.classifiers)
        check_tokens("labels", *labels, classifier.weight.size(0), true);
    }
    if (waits) finish(tokens);
    if (read_anything) advance();
    read_anything = true;

    const at::Tensor rows = at::index_select(embedding, 0, tokens);  // [B,I]
    const at::Tensor by_sample = p.input.view({p.R / p.B, p.B, p.I});
    by_sample.copy_(rows.unsqueeze(0).expand_as(by_sample));
    if (input_mask.defined()) p.input.view({p.R, p.I}).mul_(input_mask);
    choose_rows(labels);
    stack.read_input();
    stack.advance(0);
    if (deferred != nullptr) {
      waits = true;
      const at::Tensor predicted = deferred->predict(states.read_by_signal(0));
      check_launches(p.device());
      return predicted;
    }
    if (recoding) recoding->run(0);
    check_launches(p.device());
    return predict();
  }

  void finish(const at::Tensor& gold) override {
    TORCH_CHECK_VALUE(waits, "there is no step to finish: feed a token first");
    check_stream();
    check_tokens("gold", gold, p.V, true);
    deferred->gold_tokens().copy_(gold);
    ignored_rows(gold);
    recoding->run(0);
    check_launches(p.device());
    waits = false;
  }

  at::Tensor h() const override {
    if (!read_anything) return p.h0.clone();
    return waits ? states.raw(0, false) : states.h_after(0).clone();
  }
  at::Tensor c() const override {
    if (!read_anything) return p.c0.clone();
    return waits ? states.raw(0, true) : states.c_after(0).clone();
  }
  at::Tensor delta() const override {
    return recoding ? recoding->delta.tensor()[0].clone() : at::zeros({p.B}, p.accum());
  }
  bool pending() const override { return waits; }
  int64_t time() const override { return p.spec.time + (read_anything ? 1 : 0); }

 private:
  void make_recoder() {
    if (p.signal.reads_target && !p.spec.argmax) {
      auto own = std::make_unique<DeferredGold<S>>(p);
      deferred = own.get();
      signal = std::move(own);
    } else {
      signal = make_signal<S>(p);
    }
    policy = make_step_policy<S>(p, kSteps);
    signal->begin_forward({states, SharedLoss<S>{}, policy->tries(), /*traces=*/false});
    recoding = std::make_unique<Recoding<S>>(states, *signal, *policy, typename Recoding<S>::Keep{},
                                             kSteps);
  }

  // Kernels go on launching where they began; multiplications follow the current stream.
  void check_stream() const {
    TORCH_CHECK_VALUE(launch_on(p.device()).stream == stream,
                      "a reader must be used on the CUDA stream that was current when it was made");
  }

  void check_tokens(const char* name, const at::Tensor& tokens, int64_t limit, bool may_ignore) {
    TORCH_CHECK_VALUE(tokens.sizes() == at::IntArrayRef({p.B}), name, " must have shape [B] = [",
                      p.B, "], got ", tokens.sizes());
    TORCH_CHECK_TYPE(tokens.scalar_type() == at::kLong, name, " must be int64, got ",
                     tokens.scalar_type());
    TORCH_CHECK_VALUE(tokens.device() == p.device(), name, " must be on ", p.device(), ", got ",
                      tokens.device());
    check_targets_in_range(name, tokens, limit);
    if (may_ignore) return;
    if (!host_reads(tokens.device()))
      at::_assert_async((tokens >= 0).all(), "tokens must not be ignored");
    else
      TORCH_CHECK_VALUE(tokens.min().item<int64_t>() >= 0, name, " must not be ignored: got ",
                        kIgnoreTarget);
  }

  // The states of the last step become those before this one.
  void advance() {
    p.h0.copy_(states.h_after(0));
    p.c0.copy_(states.c_after(0));
    ++p.spec.time;
  }

  // Which rows are recoded in this step: by chance, and by what is labelled.
  void choose_rows(const OptionalTensor& labels) {
    if (!p.active.defined()) return;
    p.active.fill_(1);
    if (p.spec.probability < 1) {
      // As RecodingLSTMBase draws it for a whole sequence.
      const Buffer<A> kept({p.B}, p.accum());
      kernels_for<S>(p.device())
          .dropout_mask(launch_on(p.device()),
                        DropoutMask<A>{p.B, 1, p.dropout_of(kSkipStream, 1 - p.spec.probability),
                                       static_cast<uint32_t>(p.spec.time), 0, kept()});
      p.active.view({p.R / p.B, p.B}).mul_(kept.tensor().ne(0));
    }
    if (labels.has_value()) {
      p.labels[0].copy_(*labels);
      ignored_rows(*labels);
    }
  }

  void ignored_rows(const at::Tensor& tokens) {
    if (p.active.defined()) p.active[0].mul_((tokens != kIgnoreTarget).to(at::kByte));
  }

  // Log probabilities [B,V] from the states to decode.
  at::Tensor predict() const {
    const int64_t K = int64_t(decoders.size());
    const S* decoded = states.output();
    std::vector<at::Tensor> members;
    for (int64_t k = 0; k < K; ++k) {
      const at::Tensor logits = at::empty({p.R, p.V}, p.accum());
      const at::Tensor& bias = predictors[k].bias;
      decoders[k].multiply(p.R, decoded, logits.mutable_data_ptr<A>(),
                           bias.defined() ? bias.const_data_ptr<A>() : nullptr);
      members.push_back(logits);
    }
    const at::Tensor predictions =
        at::log_softmax(at::stack(members).view({-1, p.B, p.V}), -1);  // [K,B,V]
    if (predictions.size(0) == 1) return predictions[0];
    return at::logsumexp(predictions, 0) - std::log(double(predictions.size(0)));
  }

  Problem p;
  at::Tensor embedding;  // [V,I]
  CellStates<S> states;
  CellStack<S> stack;
  at::Tensor input_mask;  // [R,I] or undefined
  std::unique_ptr<Signal<S>> signal;
  DeferredGold<S>* deferred = nullptr;  // the signal, if it waits for its token
  std::unique_ptr<StepPolicy<S>> policy;
  std::unique_ptr<Recoding<S>> recoding;
  std::vector<LinearMap> predictors;        // whose predictions are averaged
  std::vector<ConstantMatrix<S>> decoders;  // [H -> V] of each
  void* const stream = launch_on(p.device()).stream;
  bool read_anything = false, waits = false;
};

}  // namespace

Reader::Reader(const at::Tensor& embedding, const at::Tensor& h0, const at::Tensor& c0,
               std::vector<at::Tensor> weights, const at::Tensor& decoder_weight,
               const OptionalTensor& decoder_bias, std::vector<at::Tensor> signal,
               std::vector<at::Tensor> step, const OptionalTensor& gate, const OptionalTensor& seed,
               std::string encoded) {
  const c10::DeviceGuard guard(embedding.device());
  const Spec spec = parse_spec(encoded);
  const SignalFacts& facts = signal_family(spec.signal).facts;
  TORCH_CHECK_VALUE(embedding.dim() == 2, "embedding must have shape [V, I], got ",
                    embedding.sizes());
  TORCH_CHECK_VALUE(h0.dim() == 3, "h0 must have shape [L, B, H], got ", h0.sizes());
  TORCH_CHECK_VALUE(spec.samples >= 1, "samples must be at least 1, got ", spec.samples);
  const int64_t B = h0.size(1) / (facts.own_states ? spec.samples : 1);
  const at::Tensor input = at::zeros({1, B, embedding.size(1)}, embedding.options());
  OptionalTensor labels, mask;
  if (facts.reads_labels) labels = at::zeros({1, B}, input.options().dtype(at::kLong));
  // Rows that are not recoded are known step by step; gold tokens may be ignored.
  if (spec.probability < 1 || facts.sees_labels())
    mask = at::ones({1, B}, input.options().dtype(at::kBool));
  Problem p = make_problem({input,
                            h0.clone(),
                            c0.clone(),
                            weights,
                            decoder_weight,
                            decoder_bias,
                            signal,
                            step,
                            gate,
                            {},
                            labels,
                            mask,
                            {},
                            seed},
                           spec, Role::kReader);
  if (p.input.scalar_type() == at::kDouble)
    reader_ = std::make_unique<TypedReader<double>>(std::move(p), embedding);
  else
    reader_ = std::make_unique<TypedReader<float>>(std::move(p), embedding);
}

}  // namespace fused_recoder
