// The entropy of the mean of K predictions: MC Dropout with its three kinds of masks, ensembles,
// variational RNNs. Instances are taken in blocks, so that K rows of logits each stay within
// bounds whatever K and V are.
#include <algorithm>

#include "signal_stage.h"

namespace fused_recoder {
namespace {

// Logits held at a time, in elements: 32 MB of float.
constexpr int64_t kLogits = int64_t(8) << 20;
// A block's masked weights are made anew for each block: here memory is cheaper than time.
constexpr int64_t kLogitsUnderWeightMasks = int64_t(32) << 20;

template <typename S>
class MixtureStage : public SignalStage<S> {
 protected:
  using A = typename AccumulateIn<S>::type;
  using typename SignalStage<S>::Gradient;

 public:
  MixtureStage(const Sequence& sequence, int64_t logits_held)
      : s(sequence),
        K(s.options.samples),
        kernels(kernels_for<S>(s.input.device())),
        launch(launch_on(s.input.device())),
        accum(s.h0.options()) {
    block = std::clamp<int64_t>(logits_held / (K * s.V), 1, s.B);
    // Blocks of equal size.
    block = (s.B + (s.B + block - 1) / block - 1) / ((s.B + block - 1) / block);
    logits = Buffer<A>({K, block, s.V}, accum);
    log_mean = Buffer<A>({block, s.V}, accum);
    dh = Buffer<A>({s.R, s.H}, accum);
  }

  Gradient gradient(int64_t t, const S* top, A* delta) final {
    for (int64_t b = 0; b < s.B; b += block) {
      const int64_t rows = std::min(block, s.B - b);
      decode(t, top, b, rows);
      mixture(rows, delta + b, /*direction=*/true);
      decode_back(t, b, rows);
    }
    return {dh(), nullptr};
  }

  void value(int64_t t, const S* top, A* delta) final {
    for (int64_t b = 0; b < s.B; b += block) {
      const int64_t rows = std::min(block, s.B - b);
      decode(t, top, b, rows);
      mixture(rows, delta + b, /*direction=*/false);
    }
  }

 protected:
  // logits [K,rows,V] of the instances [b, b + rows)
  virtual void decode(int64_t t, const S* top, int64_t b, int64_t rows) = 0;
  // dh of these instances, from the directions that took the place of the logits
  virtual void decode_back(int64_t t, int64_t b, int64_t rows) = 0;

  const A* bias(int64_t decoder = 0) const {
    const at::Tensor& bias = s.decoders[decoder].bias;
    return bias.defined() ? bias.const_data_ptr<A>() : nullptr;
  }
  uint32_t time(int64_t t) const { return static_cast<uint32_t>(s.options.time + t); }

  const Sequence& s;
  const int64_t K;
  const Kernels<S>& kernels;
  const Launch launch;
  const at::TensorOptions accum;
  int64_t block;       // instances at a time
  Buffer<A> logits;    // [K,block,V] (as [K,rows,V]) logits, then u
  Buffer<A> log_mean;  // [block,V]
  Buffer<A> dh;        // [R,H]

 private:
  void mixture(int64_t rows, A* delta, bool direction) {
    MixtureSignal<S> p{};
    p.samples = K;
    p.rows = rows;
    p.vocab = s.V;
    p.logits = logits();
    p.direction = direction ? logits() : nullptr;
    p.log_mean = log_mean();
    p.delta = delta;
    kernels.mixture_signal(launch, p);
  }
};

// A mask per instance, step and sample: K rows per instance through one decoder.
template <typename S>
class UnitMasks final : public MixtureStage<S> {
  using typename MixtureStage<S>::A;
  using MixtureStage<S>::s;
  using MixtureStage<S>::K;

 public:
  explicit UnitMasks(const Sequence& sequence)
      : MixtureStage<S>(sequence, kLogits),
        to_vocab(s.decoders[0].weight, true, s.T, K * this->block),
        to_hidden(s.decoders[0].weight, false, s.T, K * this->block),
        masked({K, this->block, s.H}, s.input.options()),
        back({K, this->block, s.H}, this->accum) {}

 private:
  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    MaskRows<S> p{};
    p.samples = K;
    p.rows = rows;
    p.units = s.H;
    p.dropout = s.sample_dropout();
    p.time = this->time(t);
    p.first_row = static_cast<uint32_t>(b);
    p.in = top + b * s.H;
    p.out = masked();
    this->kernels.mask_rows(this->launch, p);
    to_vocab.multiply(K * rows, masked(), this->logits(), this->bias());
  }

  void decode_back(int64_t t, int64_t b, int64_t rows) override {
    to_hidden.multiply(K * rows, this->logits(), back());
    MaskSum<S> p{};
    p.samples = K;
    p.rows = rows;
    p.units = s.H;
    p.dropout = s.sample_dropout();
    p.time = this->time(t);
    p.first_row = static_cast<uint32_t>(b);
    p.in = back();
    p.out = this->dh(b);
    this->kernels.mask_sum(this->launch, p);
  }

  ConstantMatrix<S> to_vocab, to_hidden;
  Buffer<S> masked;  // [K,block,H]
  Buffer<A> back;    // [K,block,H]
};

// One mask per step and sample for the whole batch: only the columns of W that it drops (or keeps)
// are multiplied.
template <typename S>
class SharedMasks final : public MixtureStage<S> {
  using typename MixtureStage<S>::A;
  using MixtureStage<S>::s;
  using MixtureStage<S>::K;

 public:
  explicit SharedMasks(const Sequence& sequence)
      : MixtureStage<S>(sequence, kLogits),
        to_vocab(s.decoders[0].weight, true, /*calls=*/4 + s.T, K * this->block),
        transposed(s.decoders[0].weight.t().contiguous()),
        scratch({K + 1, this->block, s.H}, s.input.options()),
        units({K, s.H}, s.input.options().dtype(at::kInt)),
        counts({K}, s.input.options().dtype(at::kInt)) {}

 private:
  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    list_units(t);
    SharedDecode<S> p{};
    p.samples = K;
    p.rows = rows;
    p.hidden = s.H;
    p.vocab = s.V;
    p.lists = lists();
    p.h = top + b * s.H;
    p.packed = to_vocab.packed();
    p.bias = this->bias();
    p.scratch = scratch();
    p.logits = this->logits();
    this->kernels.shared_decode(this->launch, p);
  }

  void decode_back(int64_t, int64_t b, int64_t rows) override {
    SharedDecodeBack<S> p{};
    p.samples = K;
    p.rows = rows;
    p.hidden = s.H;
    p.vocab = s.V;
    p.lists = lists();
    p.u = this->logits();
    p.weight_t = transposed.template const_data_ptr<S>();
    p.u_sum = this->log_mean();  // no longer needed
    p.dh = this->dh(b);
    this->kernels.shared_decode_back(this->launch, p);
  }

  UnitLists lists() const {
    return {units(), counts(), s.options.sample_p <= 0.5, 1 / (1 - s.options.sample_p)};
  }

  // The columns of this step's masks, once per step.
  void list_units(int64_t t) {
    if (this->time(t) == listed_time) return;
    listed_time = this->time(t);
    const Dropout dropout = s.sample_dropout();
    const bool dropped = lists().dropped;
    for (int64_t k = 0; k < K; ++k) {
      int32_t* list = units(k);
      int32_t count = 0;
      for (int64_t j = 0; j < s.H; j += 4) {
        float factor[4] = {1, 1, 1, 1};
        if (dropout.seed != nullptr)
          dropout_quad<float>(dropout, this->time(t), static_cast<uint32_t>(k), 0,
                              static_cast<uint32_t>(j / 4), factor);
        for (int64_t i = 0; i < 4 && j + i < s.H; ++i)
          if ((factor[i] == 0) == dropped) list[count++] = static_cast<int32_t>(j + i);
      }
      *counts(k) = count;
    }
  }

  ConstantMatrix<S> to_vocab;
  at::Tensor transposed;   // [H,V]
  Buffer<S> scratch;       // [K+1,block,H]
  Buffer<int32_t> units;   // [K,H]
  Buffer<int32_t> counts;  // [K]
  int64_t listed_time = -1;
};

// A mask of V x H weights per step and sample, the thesis's equations to the letter.
template <typename S>
class WeightMasks final : public MixtureStage<S> {
  using typename MixtureStage<S>::A;
  using MixtureStage<S>::s;
  using MixtureStage<S>::K;

 public:
  explicit WeightMasks(const Sequence& sequence)
      : MixtureStage<S>(sequence, kLogitsUnderWeightMasks),
        masked(at::empty_like(s.decoders[0].weight)) {}

 private:
  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    for (int64_t k = 0; k < K; ++k)
      mask(t, k, true).multiply(rows, top + b * s.H, this->logits() + k * rows * s.V, this->bias());
  }

  void decode_back(int64_t t, int64_t b, int64_t rows) override {
    for (int64_t k = 0; k < K; ++k)
      mask(t, k, false)
          .multiply(rows, this->logits() + k * rows * s.V, this->dh(b), nullptr,
                    /*accumulate=*/k > 0);
  }

  ConstantMatrix<S> mask(int64_t t, int64_t k, bool transposed) const {
    MaskRows<S> p{};
    p.samples = 1;
    p.rows = s.V;
    p.units = s.H;
    p.dropout = s.sample_dropout();
    p.time = this->time(t);
    p.first_sample = static_cast<uint32_t>(k);
    p.in = s.decoders[0].weight.template const_data_ptr<S>();
    p.out = masked.template mutable_data_ptr<S>();
    this->kernels.mask_rows(this->launch, p);
    return ConstantMatrix<S>(masked, transposed, 1, 1);
  }

  at::Tensor masked;  // [V,H]
};

// Predictions of K decoders for one state, or of one decoder for K states.
template <typename S>
class Heads final : public MixtureStage<S> {
  using typename MixtureStage<S>::A;
  using MixtureStage<S>::s;
  using MixtureStage<S>::K;

 public:
  explicit Heads(const Sequence& sequence) : MixtureStage<S>(sequence, kLogits) {
    for (const LinearMap& decoder : s.decoders) {
      to_vocab.emplace_back(decoder.weight, true, s.T, this->block);
      to_hidden.emplace_back(decoder.weight, false, s.T, this->block);
    }
  }

 private:
  bool one_state() const { return s.R == s.B && s.options.ensemble(); }
  int64_t decoder(int64_t k) const { return one_state() ? k : 0; }
  int64_t row(int64_t k, int64_t b) const { return one_state() ? b : k * s.B + b; }

  void decode(int64_t, const S* top, int64_t b, int64_t rows) override {
    for (int64_t k = 0; k < K; ++k)
      to_vocab[decoder(k)].multiply(rows, top + row(k, b) * s.H, this->logits() + k * rows * s.V,
                                    this->bias(decoder(k)));
  }

  void decode_back(int64_t, int64_t b, int64_t rows) override {
    for (int64_t k = 0; k < K; ++k)
      to_hidden[decoder(k)].multiply(rows, this->logits() + k * rows * s.V, this->dh(row(k, b)),
                                     nullptr,
                                     /*accumulate=*/one_state() && k > 0);
  }

  std::vector<ConstantMatrix<S>> to_vocab, to_hidden;
};

}  // namespace

template <typename S>
std::unique_ptr<SignalStage<S>> make_mixture_stage(const Sequence& s) {
  switch (s.options.mixture) {
    case MixtureKind::kUnitMasks:
      return std::make_unique<UnitMasks<S>>(s);
    case MixtureKind::kSharedMasks:
      return std::make_unique<SharedMasks<S>>(s);
    case MixtureKind::kWeightMasks:
      return std::make_unique<WeightMasks<S>>(s);
    default:
      return std::make_unique<Heads<S>>(s);
  }
}

template std::unique_ptr<SignalStage<float>> make_mixture_stage(const Sequence&);
template std::unique_ptr<SignalStage<double>> make_mixture_stage(const Sequence&);

}  // namespace fused_recoder
