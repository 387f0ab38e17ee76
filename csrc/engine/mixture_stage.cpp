// The entropy of the mean of K predictions: MC Dropout with its three kinds of masks, ensembles,
// variational RNNs. Instances are taken in blocks, so that K rows of logits each stay within
// bounds whatever K and V are.
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>

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
  // What the logits that decode() left are still without, and what decode_back() wants beside u.
  virtual void complete(MixtureSignal<S>&) {}

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
    complete(p);
    kernels.mixture_signal(launch, p);
  }
};

// A mask per instance (or one for all), step and sample: K rows per instance through one decoder.
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
    p.shared = shared();
    p.first_row = static_cast<uint32_t>(shared() ? 0 : b);
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
    p.shared = shared();
    p.first_row = static_cast<uint32_t>(shared() ? 0 : b);
    p.in = back();
    p.out = this->dh(b);
    this->kernels.mask_sum(this->launch, p);
  }

  bool shared() const { return s.options.mixture == MixtureKind::kSharedMasks; }

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
        counts({K}, s.input.options().dtype(at::kInt)) {
    if (!lists().dropped) return;
    to_hidden = ConstantMatrix<S>(s.decoders[0].weight, false, s.T, this->block);
    u_sum = Buffer<S>({this->block, s.V}, s.input.options());
  }

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

  void complete(MixtureSignal<S>& p) override {
    if (lists().dropped && p.direction != nullptr) p.direction_sum = u_sum();
  }

  void decode_back(int64_t, int64_t b, int64_t rows) override {
    if (lists().dropped) to_hidden.multiply(rows, u_sum(), this->dh(b));
    SharedDecodeBack<S> p{};
    p.samples = K;
    p.rows = rows;
    p.hidden = s.H;
    p.vocab = s.V;
    p.lists = lists();
    p.u = this->logits();
    p.weight_t = transposed.template const_data_ptr<S>();
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

  ConstantMatrix<S> to_vocab, to_hidden;
  at::Tensor transposed;   // [H,V]
  Buffer<S> u_sum;         // [block,V]
  Buffer<S> scratch;       // [K+1,block,H]
  Buffer<int32_t> units;   // [K,H]
  Buffer<int32_t> counts;  // [K]
  int64_t listed_time = -1;
};

// The same for devices that multiply best through their libraries: the columns that the masks list
// are gathered into matrices of their own. All lists have one length: the longest, where the host
// knows the seed; else so long that chance will not need more (it is asserted on the device).
template <typename S>
class GatheredMasks final : public MixtureStage<S> {
  using typename MixtureStage<S>::A;
  using MixtureStage<S>::s;
  using MixtureStage<S>::K;

 public:
  explicit GatheredMasks(const Sequence& sequence)
      : MixtureStage<S>(sequence, kLogits),
        dropped(s.options.sample_p <= 0.5),
        scale(1 / (1 - s.options.sample_p)),
        weight(s.decoders[0].weight),
        transposed(weight.t().contiguous()) {
    if (dropped) {
      common = Buffer<A>({this->block, s.V}, this->accum);
      u_sum = Buffer<S>({this->block, s.V}, s.input.options());
    }
    list_units();
  }

 private:
  // Elements of gathered columns held at a time: 128 MB of float.
  static constexpr int64_t kGathered = int64_t(32) << 20;

  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    if (this->time(0) != listed_from) list_units();  // a reader moves on
    if (dropped) {
      at::Tensor out = common.tensor().narrow(0, 0, rows);
      const at::Tensor& bias = s.decoders[0].bias;
      at::addmm_out(out, bias.defined() ? bias : out, state(top, b, rows), weight.t(),
                    /*beta=*/bias.defined() ? 1 : 0, /*alpha=*/scale);
    }
    for (int64_t k = 0; k < K; k += group) {
      const int64_t count = std::min(group, K - k);
      gather(t, k, count, top + b * s.H, rows);
      at::Tensor out = logits_of(k, count, rows);
      at::bmm_out(out, tensor_at(listed_h(), {count, rows, length}, device()), columns_of(count));
    }
  }

  void complete(MixtureSignal<S>& p) override {
    p.common = dropped ? common() : this->bias();
    p.common_stride = dropped ? s.V : 0;
    if (dropped && p.direction != nullptr) p.direction_sum = u_sum();
  }

  void decode_back(int64_t t, int64_t b, int64_t rows) override {
    if (dropped) {
      at::Tensor out = tensor_at(this->dh(b), {rows, s.H}, device());
      at::mm_out(out, u_sum.tensor().narrow(0, 0, rows), weight);
    }
    for (int64_t k = 0; k < K; k += group) {
      const int64_t count = std::min(group, K - k);
      if (group < K) gather(t, k, count, nullptr, rows);
      at::Tensor out = tensor_at(back() + k * rows * length, {count, rows, length}, device());
      at::bmm_out(out, logits_of(k, count, rows), columns_of(count).transpose(1, 2));
    }
    ScatterUnits<S> p{};
    p.samples = K;
    p.rows = rows;
    p.hidden = s.H;
    p.length = length;
    p.place = place(t);
    p.back = back();
    p.factor = dropped ? -scale : scale;
    p.base_factor = dropped ? scale : 0;
    p.dh = this->dh(b);
    this->kernels.scatter_units(this->launch, p);
  }

  at::Device device() const { return s.input.device(); }
  at::Tensor state(const S* top, int64_t b, int64_t rows) const {
    return tensor_at(const_cast<S*>(top) + b * s.H, {rows, s.H}, device());
  }
  at::Tensor logits_of(int64_t k, int64_t count, int64_t rows) const {
    return tensor_at(this->logits() + k * rows * s.V, {count, rows, s.V}, device());
  }
  at::Tensor columns_of(int64_t count) const { return columns.tensor().narrow(0, 0, count); }

  // The columns of samples [k, k + count), unless they are those gathered last, and the states'
  // listed units. No states: columns only.
  void gather(int64_t t, int64_t k, int64_t count, const S* h, int64_t rows) {
    GatherUnits<S> p{};
    p.samples = count;
    p.rows = h != nullptr ? rows : 0;
    p.hidden = s.H;
    p.vocab = s.V;
    p.length = length;
    p.listed = listed(t, k);
    p.h = h;
    p.factor = dropped ? -scale : scale;
    p.listed_h = listed_h();
    p.weight_t = transposed.template const_data_ptr<S>();
    const bool known = gathered_time == this->time(t) && gathered_first == k;
    p.columns = known ? nullptr : columns();
    gathered_time = this->time(t);
    gathered_first = k;
    if (h != nullptr || !known) this->kernels.gather_units(this->launch, p);
  }

  // A mask lists more with a probability below e^-30 (Bernstein's inequality).
  int64_t enough_units() const {
    const double q = std::min(s.options.sample_p, 1 - s.options.sample_p), unlikely = 30;
    const double variance = s.H * q * (1 - q);
    const double above =
        unlikely / 3 + std::sqrt(unlikely * unlikely / 9 + 2 * unlikely * variance);
    return std::clamp<int64_t>(std::ceil(s.H * q + above), 1, s.H);
  }

  // Of all steps, before the first of them.
  void list_units() {
    listed_from = this->time(0);
    const at::TensorOptions on_device = s.input.options().dtype(at::kInt);
    if (s.host_seed.defined() || s.options.sample_p == 0) {
      const int64_t longest = list_on_the_host();
      if (longest > length) make_room(longest);
      fill_lists();
      listed = Buffer<int32_t>(listed.tensor().to(on_device));
      place = Buffer<int32_t>(place.tensor().to(on_device));
      return;
    }
    if (!listed) {
      make_room(enough_units());
      listed = Buffer<int32_t>({s.T, K, length}, on_device);
      place = Buffer<int32_t>({s.T, K, s.H}, on_device);
    }
    this->kernels.list_units(this->launch, ListUnits{s.T, K, s.H, length, s.sample_dropout(),
                                                     this->time(0), dropped, listed(), place()});
  }

  void make_room(int64_t for_length) {
    length = for_length;
    group = std::clamp<int64_t>(kGathered / (length * s.V), 1, K);
    columns = Buffer<S>({group, length, s.V}, s.input.options());
    listed_h = Buffer<S>({group, this->block, length}, s.input.options());
    back = Buffer<A>({K, this->block, length}, this->accum);
  }

  // Fills `place`; returns the length of the longest list.
  int64_t list_on_the_host() {
    const int64_t* seed =
        s.host_seed.defined() ? s.host_seed.template const_data_ptr<int64_t>() : nullptr;
    const Dropout dropout = make_dropout(seed, kSampleStream, s.options.sample_p);
    place = Buffer<int32_t>({s.T, K, s.H}, at::TensorOptions(at::kCPU).dtype(at::kInt));
    int32_t longest = 1;  // matrices without columns would be a case of their own
    for (int64_t i = 0; i < s.T * K; ++i) {
      int32_t count = 0;
      for (int64_t j = 0; j < s.H; j += 4) {
        float factor[4] = {1, 1, 1, 1};
        if (dropout.seed != nullptr)
          dropout_quad<float>(dropout, this->time(i / K), static_cast<uint32_t>(i % K), 0,
                              static_cast<uint32_t>(j / 4), factor);
        for (int64_t unit = j; unit < std::min(j + 4, s.H); ++unit)
          place()[i * s.H + unit] = (factor[unit - j] == 0) == dropped ? count++ : -1;
      }
      longest = std::max(longest, count);
    }
    return longest;
  }

  // `listed` from `place`, on the host.
  void fill_lists() {
    listed = Buffer<int32_t>(at::full({s.T, K, length}, -1, place.tensor().options()));
    for (int64_t i = 0; i < s.T * K; ++i)
      for (int64_t j = 0; j < s.H; ++j) {
        const int32_t where = place()[i * s.H + j];
        if (where >= 0) listed()[i * length + where] = static_cast<int32_t>(j);
      }
  }

  const bool dropped;       // the listed units are those dropped, not those kept
  const double scale;       // 1 / (1 - p)
  at::Tensor weight;        // [V,H]
  at::Tensor transposed;    // [H,V]
  int64_t length = 0;       // of a list
  int64_t group = 1;        // samples whose columns are gathered at a time
  Buffer<int32_t> listed;   // [T,K,length]
  Buffer<int32_t> place;    // [T,K,H]
  int64_t listed_from = 0;  // the time of the first list
  int64_t gathered_time = -1, gathered_first = -1;  // whose columns are in `columns`
  Buffer<S> columns;                                // [group,length,V]
  Buffer<S> listed_h;                               // [group,block,length]
  Buffer<A> common;                                 // [block,V] what all samples share
  Buffer<S> u_sum;                                  // [block,V]
  Buffer<A> back;                                   // [K,block,length]
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
        // Where kernels are launched one by one, all samples are masked in one launch.
        held(this->kernels.gemm != nullptr
                 ? 1
                 : std::clamp<int64_t>(kMaskedWeights / (s.V * s.H), 1, K)),
        masked({held, s.V, s.H}, s.input.options()) {}

 private:
  // Elements of masked weights held at a time: 256 MB of float.
  static constexpr int64_t kMaskedWeights = int64_t(64) << 20;

  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    for (int64_t k = 0; k < K; ++k)
      ConstantMatrix<S>(masked_weight(t, k), true, 1, 1)
          .multiply(rows, top + b * s.H, this->logits() + k * rows * s.V, this->bias());
  }

  void decode_back(int64_t t, int64_t b, int64_t rows) override {
    for (int64_t k = 0; k < K; ++k)
      ConstantMatrix<S>(masked_weight(t, k), false, 1, 1)
          .multiply(rows, this->logits() + k * rows * s.V, this->dh(b), nullptr,
                    /*accumulate=*/k > 0);
  }

  // [V,H] of sample k, made together with those held beside it.
  at::Tensor masked_weight(int64_t t, int64_t k) {
    const int64_t first = k / held * held;
    if (masked_time != this->time(t) || masked_first != first) {
      MaskRows<S> p{};
      p.samples = std::min(held, K - first);
      p.rows = s.V;
      p.units = s.H;
      p.dropout = s.sample_dropout();
      p.time = this->time(t);
      p.first_sample = static_cast<uint32_t>(first);
      p.in = s.decoders[0].weight.template const_data_ptr<S>();
      p.out = masked();
      this->kernels.mask_rows(this->launch, p);
      masked_time = this->time(t);
      masked_first = first;
    }
    return masked.tensor()[k - first];
  }

  const int64_t held;                           // samples whose weights are masked together
  Buffer<S> masked;                             // [held,V,H]
  int64_t masked_time = -1, masked_first = -1;  // what is in `masked`
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

  // One decoder for all rows there are: one product.
  bool at_once(int64_t rows) const { return !one_state() && rows == s.B; }

  void decode(int64_t, const S* top, int64_t b, int64_t rows) override {
    if (at_once(rows)) return to_vocab[0].multiply(s.R, top, this->logits(), this->bias());
    for (int64_t k = 0; k < K; ++k)
      to_vocab[decoder(k)].multiply(rows, top + row(k, b) * s.H, this->logits() + k * rows * s.V,
                                    this->bias(decoder(k)));
  }

  void decode_back(int64_t, int64_t b, int64_t rows) override {
    if (at_once(rows)) return to_hidden[0].multiply(s.R, this->logits(), this->dh());
    for (int64_t k = 0; k < K; ++k)
      to_hidden[decoder(k)].multiply(rows, this->logits() + k * rows * s.V, this->dh(row(k, b)),
                                     nullptr,
                                     /*accumulate=*/one_state() && k > 0);
  }

  std::vector<ConstantMatrix<S>> to_vocab, to_hidden;
};

// Whether listed columns are less to multiply than K whole products: with one sample (or two, and
// a large p) they are not. Products with lists are slower by about a quarter.
bool lists_pay(const Sequence& s) {
  const double p = s.options.sample_p, K = s.options.samples;
  const double columns = p <= 0.5 ? 1 + K * p : K * (1 - p);  // in units of all columns
  return 1.25 * columns < K;
}

}  // namespace

template <typename S>
std::unique_ptr<SignalStage<S>> make_mixture_stage(const Sequence& s) {
  switch (s.options.mixture) {
    case MixtureKind::kUnitMasks:
      return std::make_unique<UnitMasks<S>>(s);
    case MixtureKind::kSharedMasks:
      if (!lists_pay(s)) return std::make_unique<UnitMasks<S>>(s);
      if (kernels_for<S>(s.input.device()).shared_decode == nullptr)
        return std::make_unique<GatheredMasks<S>>(s);
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
