// MC Dropout with shared masks for devices that multiply best through their libraries: the columns
// that the masks list are gathered into matrices of their own. All lists have one length: the
// longest, where the host knows the seed; else so long that chance will not need more (it is
// asserted on the device).
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>

#include "makers.h"
#include "mixture.h"

namespace fused_recoder {
namespace {

template <typename S>
class GatheredMasks final : public UnitMaskedMixture<S> {
  using typename Mixture<S>::A;
  using Mixture<S>::p;
  using Mixture<S>::K;

 public:
  explicit GatheredMasks(const Problem& problem)
      : UnitMaskedMixture<S>(problem, /*shared=*/true),
        dropped(p.spec.sample_p <= 0.5),
        scale(1 / (1 - p.spec.sample_p)),
        weight(p.decoders[0].weight) {}

 private:
  // Elements of gathered columns held at a time: 128 MB of float.
  static constexpr int64_t kGathered = int64_t(32) << 20;

  void prepare_forward() override {
    transposed = weight.t().contiguous();
    if (dropped) {
      common = Buffer<A>({this->block, p.V}, p.accum());
      u_sum = Buffer<S>({this->block, p.V}, p.storage());
    }
    list_units();
  }

  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    if (this->time(0) != listed_from) list_units();  // a reader moves on
    if (dropped) {
      at::Tensor out = common.tensor().narrow(0, 0, rows);
      const at::Tensor& bias = p.decoders[0].bias;
      at::addmm_out(out, bias.defined() ? bias : out, state(top, b, rows), weight.t(),
                    /*beta=*/bias.defined() ? 1 : 0, /*alpha=*/scale);
    }
    for (int64_t k = 0; k < K; k += group) {
      const int64_t count = std::min(group, K - k);
      gather(t, k, count, top + b * p.H, rows);
      at::Tensor out = logits_of(k, count, rows);
      at::bmm_out(out, tensor_at(listed_h(), {count, rows, length}, device()), columns_of(count));
    }
  }

  void complete(MixtureSignal<S>& k) override {
    k.common = dropped ? common() : this->bias();
    k.common_stride = dropped ? p.V : 0;
    if (dropped && k.direction != nullptr) k.direction_sum = u_sum();
  }

  void decode_back(int64_t t, int64_t b, int64_t rows) override {
    if (dropped) {
      at::Tensor out = tensor_at(this->dh(b), {rows, p.H}, device());
      at::mm_out(out, u_sum.tensor().narrow(0, 0, rows), weight);
    }
    for (int64_t k = 0; k < K; k += group) {
      const int64_t count = std::min(group, K - k);
      if (group < K) gather(t, k, count, nullptr, rows);
      at::Tensor out = tensor_at(back() + k * rows * length, {count, rows, length}, device());
      at::bmm_out(out, logits_of(k, count, rows), columns_of(count).transpose(1, 2));
    }
    ScatterUnits<S> k{};
    k.samples = K;
    k.rows = rows;
    k.hidden = p.H;
    k.length = length;
    k.place = place(t);
    k.back = back();
    k.factor = dropped ? -scale : scale;
    k.base_factor = dropped ? scale : 0;
    k.dh = this->dh(b);
    this->kernels.scatter_units(this->launch, k);
  }

  at::Device device() const { return p.device(); }
  at::Tensor state(const S* top, int64_t b, int64_t rows) const {
    return tensor_at(const_cast<S*>(top) + b * p.H, {rows, p.H}, device());
  }
  at::Tensor logits_of(int64_t k, int64_t count, int64_t rows) const {
    return tensor_at(this->logits() + k * rows * p.V, {count, rows, p.V}, device());
  }
  at::Tensor columns_of(int64_t count) const { return columns.tensor().narrow(0, 0, count); }

  // The columns of samples [k, k + count), unless they are those gathered last, and the states'
  // listed units. No states: columns only.
  void gather(int64_t t, int64_t first, int64_t count, const S* h, int64_t rows) {
    GatherUnits<S> k{};
    k.samples = count;
    k.rows = h != nullptr ? rows : 0;
    k.hidden = p.H;
    k.vocab = p.V;
    k.length = length;
    k.listed = listed(t, first);
    k.h = h;
    k.factor = dropped ? -scale : scale;
    k.listed_h = listed_h();
    k.weight_t = transposed.template const_data_ptr<S>();
    const bool known = gathered_time == this->time(t) && gathered_first == first;
    k.columns = known ? nullptr : columns();
    gathered_time = this->time(t);
    gathered_first = first;
    if (h != nullptr || !known) this->kernels.gather_units(this->launch, k);
  }

  // A mask lists more with a probability below e^-30 (Bernstein's inequality).
  int64_t enough_units() const {
    const double q = std::min(p.spec.sample_p, 1 - p.spec.sample_p), unlikely = 30;
    const double variance = p.H * q * (1 - q);
    const double above =
        unlikely / 3 + std::sqrt(unlikely * unlikely / 9 + 2 * unlikely * variance);
    return std::clamp<int64_t>(std::ceil(p.H * q + above), 1, p.H);
  }

  // Of all steps, before the first of them.
  void list_units() {
    listed_from = this->time(0);
    const at::TensorOptions on_device = p.storage().dtype(at::kInt);
    if (p.host_seed.defined() || p.spec.sample_p == 0) {
      const int64_t longest = list_on_the_host();
      if (longest > length) make_room(longest);
      fill_lists();
      listed = Buffer<int32_t>(listed.tensor().to(on_device));
      place = Buffer<int32_t>(place.tensor().to(on_device));
      return;
    }
    if (!listed) {
      make_room(enough_units());
      listed = Buffer<int32_t>({p.T, K, length}, on_device);
      place = Buffer<int32_t>({p.T, K, p.H}, on_device);
    }
    this->kernels.list_units(this->launch, ListUnits{p.T, K, p.H, length, p.sample_dropout(),
                                                     this->time(0), dropped, listed(), place()});
  }

  void make_room(int64_t for_length) {
    length = for_length;
    group = std::clamp<int64_t>(kGathered / (length * p.V), 1, K);
    columns = Buffer<S>({group, length, p.V}, p.storage());
    listed_h = Buffer<S>({group, this->block, length}, p.storage());
    back = Buffer<A>({K, this->block, length}, p.accum());
  }

  // Fills `place`; returns the length of the longest list.
  int64_t list_on_the_host() {
    const int64_t* seed =
        p.host_seed.defined() ? p.host_seed.template const_data_ptr<int64_t>() : nullptr;
    const Dropout dropout = make_dropout(seed, kSampleStream, p.spec.sample_p);
    place = Buffer<int32_t>({p.T, K, p.H}, at::TensorOptions(at::kCPU).dtype(at::kInt));
    int32_t longest = 1;  // matrices without columns would be a case of their own
    for (int64_t i = 0; i < p.T * K; ++i) {
      int32_t count = 0;
      for (int64_t j = 0; j < p.H; j += 4) {
        float factor[4] = {1, 1, 1, 1};
        if (dropout.seed != nullptr)
          dropout_quad<float>(dropout, this->time(i / K), static_cast<uint32_t>(i % K), 0,
                              static_cast<uint32_t>(j / 4), factor);
        for (int64_t unit = j; unit < std::min(j + 4, p.H); ++unit)
          place()[i * p.H + unit] = (factor[unit - j] == 0) == dropped ? count++ : -1;
      }
      longest = std::max(longest, count);
    }
    return longest;
  }

  // `listed` from `place`, on the host.
  void fill_lists() {
    listed = Buffer<int32_t>(at::full({p.T, K, length}, -1, place.tensor().options()));
    for (int64_t i = 0; i < p.T * K; ++i)
      for (int64_t j = 0; j < p.H; ++j) {
        const int32_t where = place()[i * p.H + j];
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

}  // namespace

template <typename S>
std::unique_ptr<Signal<S>> make_gathered_masks(const Problem& problem) {
  return std::make_unique<GatheredMasks<S>>(problem);
}

template std::unique_ptr<Signal<float>> make_gathered_masks(const Problem&);
template std::unique_ptr<Signal<double>> make_gathered_masks(const Problem&);

}  // namespace fused_recoder
