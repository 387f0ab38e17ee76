#include "reader.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>

#include <cmath>

#include "forward.h"

namespace fused_recoder {
namespace {

// Steps that a reader's weights are packed for: many.
constexpr int64_t kSteps = 1 << 20;
// Up to this many rows W is streamed once for prediction and gradient together.
constexpr int64_t kStreamRows = 2;

// A gold signal whose token is not known yet: predicts first, and has its gradient later.
template <typename S>
class DeferredStage final : public SignalStage<S> {
  using A = typename AccumulateIn<S>::type;
  using typename SignalStage<S>::Gradient;

 public:
  explicit DeferredStage(const Sequence& sequence)
      : s(sequence),
        kernels(kernels_for<S>(s.input.device())),
        launch(launch_on(s.input.device())),
        logits({s.B, s.V}, s.h0.options()),
        log_sum({s.B}, s.h0.options()),
        expected({s.B, s.H}, s.h0.options()),
        dh({s.B, s.H}, s.h0.options()),
        scale({s.B}, s.h0.options()),
        gold({s.B}, s.h0.options().dtype(at::kLong)) {
    const at::Tensor& weight = s.decoders[0].weight;
    if (kernels.stream_decode != nullptr && s.B <= kStreamRows)
      stream_scratch = Buffer<A>({kernels.stream_scratch(s.B, s.H)}, s.h0.options());
    if (!stream_scratch || s.options.step == StepKind::kBacktracking)
      decode = ConstantMatrix<S>(weight, true, kSteps, s.B);
    if (!stream_scratch) {
      decode_back = ConstantMatrix<S>(weight, false, kSteps, s.B);
      probabilities = Buffer<A>({s.B, s.V}, s.h0.options());
    }
    if (s.options.step == StepKind::kBacktracking)
      trial_logits = Buffer<A>({s.B, s.V}, s.h0.options());
  }

  // Log probabilities [B,V] of the next token.
  at::Tensor predict(const S* top) {
    if (stream_scratch) {
      StreamDecode<S> p{};
      p.rows = s.B;
      p.hidden = s.H;
      p.vocab = s.V;
      p.kind = SignalKind::kSoftmax;
      p.h = top;
      p.weight = s.decoders[0].weight.template const_data_ptr<S>();
      p.bias = bias();
      p.scratch = stream_scratch();
      p.logits = logits();
      p.dh = expected();
      p.delta = log_sum();
      p.scale = scale();
      kernels.stream_decode(launch, p);
    } else {
      decode.multiply(s.B, top, logits(), bias());
      probabilities.tensor().copy_(logits.tensor());
      SoftmaxSignal<S> p{};
      p.rows = s.B;
      p.vocab = s.V;
      p.kind = SignalKind::kSoftmax;
      p.logits = probabilities();
      p.direction = probabilities();
      p.delta = log_sum();
      kernels.softmax_signal(launch, p);
      decode_back.multiply(s.B, probabilities(), expected());
    }
    return at::sub(logits.tensor(), log_sum.tensor().unsqueeze(1));
  }

  Buffer<int64_t>& gold_tokens() { return gold; }  // [B] to be filled in before gradient()

  Gradient gradient(int64_t, const S*, A* delta) override {
    GoldArrives<S> p{};
    p.rows = s.B;
    p.hidden = s.H;
    p.vocab = s.V;
    p.kind = s.options.signal;
    p.logits = logits();
    p.log_sum = log_sum();
    p.expected = expected();
    p.targets = gold();
    p.weight = s.decoders[0].weight.template const_data_ptr<S>();
    p.dh = dh();
    p.delta = delta;
    p.scale = scale();
    kernels.gold_arrives(launch, p);
    return {dh(), scale()};
  }

  void value(int64_t, const S* top, A* delta) override {
    decode.multiply(s.B, top, trial_logits(), bias());
    SoftmaxSignal<S> p{};
    p.rows = s.B;
    p.vocab = s.V;
    p.kind = s.options.signal;
    p.logits = trial_logits();
    p.targets = gold();
    p.delta = delta;
    kernels.softmax_signal(launch, p);
  }

 private:
  const A* bias() const {
    const at::Tensor& b = s.decoders[0].bias;
    return b.defined() ? b.const_data_ptr<A>() : nullptr;
  }

  const Sequence& s;
  const Kernels<S>& kernels;
  const Launch launch;
  ConstantMatrix<S> decode, decode_back;
  Buffer<A> logits;         // [B,V]
  Buffer<A> probabilities;  // [B,V]
  Buffer<A> trial_logits;   // [B,V]
  Buffer<A> log_sum;        // [B]
  Buffer<A> expected, dh;   // [B,H]
  Buffer<A> scale;          // [B]
  Buffer<A> stream_scratch;
  Buffer<int64_t> gold;  // [B]
};

template <typename S>
class TypedReader final : public StepReader {
  using A = typename AccumulateIn<S>::type;

 public:
  TypedReader(Sequence sequence, const at::Tensor& embedding, double probability)
      : s(std::move(sequence)), embedding(widen(embedding)), probability(probability) {
    std::unique_ptr<DeferredStage<S>> own;
    if (reads_target(s.options.signal) && s.options.recodes() && !s.options.argmax) {
      own = std::make_unique<DeferredStage<S>>(s);
      deferred = own.get();
    }
    forward = std::make_unique<Forward<S>>(s, typename Forward<S>::Keep{}, kSteps, std::move(own));
    if (deferred == nullptr) {
      predictors = s.ensemble && s.options.mean_logits ? std::vector<LinearMap>{s.mean_decoder()}
                                                       : s.decoders;
      for (const LinearMap& decoder : predictors)
        decoders.emplace_back(decoder.weight, true, kSteps, s.R);
    }
    input_mask = s.input_mask();
  }

  at::Tensor feed(const at::Tensor& tokens, const OptionalTensor& labels) override {
    check_tokens("tokens", tokens, embedding.size(0), false);
    if (s.options.classifies()) {
      TORCH_CHECK_VALUE(labels.has_value(), "labels must be given for a classifier (",
                        kIgnoreTarget, " where there is none)");
      for (const LinearMap& classifier : s.classifiers)
        check_tokens("labels", *labels, classifier.weight.size(0), true);
    }
    if (waits) finish(tokens);
    if (read_anything) advance();
    read_anything = true;

    const at::Tensor rows = at::index_select(embedding, 0, tokens);  // [B,I]
    const at::Tensor by_sample = s.input.view({s.R / s.B, s.B, s.I});
    by_sample.copy_(rows.unsqueeze(0).expand_as(by_sample));
    if (input_mask.defined()) s.input.view({s.R, s.I}).mul_(input_mask);
    choose_rows(labels);
    forward->read_input();
    forward->cells(0);
    if (deferred != nullptr) {
      waits = true;
      return deferred->predict(forward->signal_input(0));
    }
    if (s.options.recodes()) forward->recode(0);
    return predict();
  }

  void finish(const at::Tensor& gold) override {
    TORCH_CHECK_VALUE(waits, "there is no step to finish: feed a token first");
    check_tokens("gold", gold, s.V, true);
    deferred->gold_tokens().tensor().copy_(gold);
    ignored_rows(gold);
    forward->recode(0);
    waits = false;
  }

  at::Tensor h() const override {
    if (!read_anything) return s.h0.clone();
    return waits ? forward->raw_states(false) : forward->final_h().clone();
  }
  at::Tensor c() const override {
    if (!read_anything) return s.c0.clone();
    return waits ? forward->raw_states(true) : forward->final_c().clone();
  }
  at::Tensor delta() const override { return forward->deltas().tensor()[0].clone(); }
  bool pending() const override { return waits; }
  int64_t time() const override { return s.options.time + (read_anything ? 1 : 0); }

 private:
  void check_tokens(const char* name, const at::Tensor& tokens, int64_t limit, bool may_ignore) {
    TORCH_CHECK_VALUE(tokens.sizes() == at::IntArrayRef({s.B}), name, " must have shape [B] = [",
                      s.B, "], got ", tokens.sizes());
    TORCH_CHECK_TYPE(tokens.scalar_type() == at::kLong, name, " must be int64, got ",
                     tokens.scalar_type());
    TORCH_CHECK_VALUE(tokens.device() == s.input.device(), name, " must be on ", s.input.device(),
                      ", got ", tokens.device());
    check_targets_in_range(name, tokens, limit);
    if (!may_ignore && tokens.is_cpu())
      TORCH_CHECK_VALUE(tokens.min().item<int64_t>() >= 0, name, " must not be ignored: got ",
                        kIgnoreTarget);
  }

  // The states of the last step become those before this one.
  void advance() {
    s.h0.copy_(forward->final_h());
    s.c0.copy_(forward->final_c());
    ++s.options.time;
  }

  // Which rows are recoded in this step: by chance, and by what is labelled.
  void choose_rows(const OptionalTensor& labels) {
    if (!s.active.defined()) return;
    s.active.fill_(1);
    if (probability < 1) {
      // As RecodingLSTMBase draws it for a whole sequence.
      const Dropout skip = s.dropout_of(kSkipStream, 1 - probability);
      for (int64_t b = 0; b < s.B; ++b) {
        float factor[4];
        dropout_quad<float>(skip, static_cast<uint32_t>(s.options.time), 0,
                            static_cast<uint32_t>(b), 0, factor);
        if (factor[0] == 0)
          for (int64_t r = b; r < s.R; r += s.B) s.active[0][r] = 0;
      }
    }
    if (labels.has_value()) {
      s.labels[0].copy_(*labels);
      ignored_rows(*labels);
    }
  }

  void ignored_rows(const at::Tensor& tokens) {
    if (s.active.defined()) s.active[0].mul_((tokens != kIgnoreTarget).to(at::kByte));
  }

  // Log probabilities [B,V] from the states to decode.
  at::Tensor predict() const {
    const int64_t K = int64_t(decoders.size());
    const S* states = forward->outputs()();
    std::vector<at::Tensor> members;
    for (int64_t k = 0; k < K; ++k) {
      const at::Tensor logits = at::empty({s.R, s.V}, s.h0.options());
      const at::Tensor& bias = predictors[k].bias;
      decoders[k].multiply(s.R, states, logits.mutable_data_ptr<A>(),
                           bias.defined() ? bias.const_data_ptr<A>() : nullptr);
      members.push_back(logits);
    }
    const at::Tensor predictions =
        at::log_softmax(at::stack(members).view({-1, s.B, s.V}), -1);  // [K,B,V]
    if (predictions.size(0) == 1) return predictions[0];
    return at::logsumexp(predictions, 0) - std::log(double(predictions.size(0)));
  }

  Sequence s;
  at::Tensor embedding;  // [V,I]
  double probability;
  std::unique_ptr<Forward<S>> forward;
  DeferredStage<S>* deferred = nullptr;     // owned by forward
  std::vector<LinearMap> predictors;        // whose predictions are averaged
  std::vector<ConstantMatrix<S>> decoders;  // [H -> V] of each
  at::Tensor input_mask;                    // [R,I] or undefined
  bool read_anything = false, waits = false;
};

}  // namespace

Reader::Reader(const at::Tensor& embedding, const at::Tensor& h0, const at::Tensor& c0,
               std::vector<at::Tensor> weights, const at::Tensor& decoder_weight,
               const OptionalTensor& decoder_bias, std::vector<at::Tensor> classifiers,
               const at::Tensor& step, std::vector<at::Tensor> step_network,
               const OptionalTensor& gate, const OptionalTensor& seed, std::string signal,
               bool argmax, int64_t samples, double sample_p, bool mean_logits,
               std::vector<int64_t> classifier_states, bool recode_h, bool recode_c,
               std::string step_kind, double shrink, int64_t trials, int64_t time,
               double probability) {
  Options options;
  parse_signal(signal, options);
  options.argmax = argmax;
  options.samples = samples;
  options.sample_p = sample_p;
  options.mean_logits = mean_logits;
  options.classifier_states = classifier_states;
  options.recode_h = recode_h;
  options.recode_c = recode_c;
  options.step = parse_step(step_kind);
  options.shrink = shrink;
  options.trials = trials;
  options.time = time;
  options.reads = true;
  const int64_t B = h0.size(1) / (options.variational() ? samples : 1);
  const at::Tensor input = at::zeros({1, B, embedding.size(1)}, embedding.options());
  OptionalTensor labels, mask;
  if (options.classifies()) labels = at::zeros({1, B}, input.options().dtype(at::kLong));
  // Rows that are not recoded are known step by step; gold tokens may be ignored.
  if (probability < 1 || options.sees_labels())
    mask = at::ones({1, B}, input.options().dtype(at::kBool));
  Sequence s = make_sequence({input,
                              h0.clone(),
                              c0.clone(),
                              weights,
                              decoder_weight,
                              decoder_bias,
                              classifiers,
                              step,
                              step_network,
                              gate,
                              {},
                              labels,
                              mask,
                              {},
                              seed},
                             options);
  if (s.input.scalar_type() == at::kDouble)
    reader_ = std::make_unique<TypedReader<double>>(std::move(s), embedding, probability);
  else
    reader_ = std::make_unique<TypedReader<float>>(std::move(s), embedding, probability);
}

}  // namespace fused_recoder
