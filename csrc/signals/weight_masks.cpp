// MC Dropout with a mask of V x H weights per time step and sample, the thesis's equations to the
// letter.
#include <algorithm>

#include "makers.h"
#include "mixture.h"

namespace fused_recoder {
namespace {

// A block's masked weights are made anew for each block: here memory is cheaper than time.
constexpr int64_t kLogitsUnderWeightMasks = int64_t(32) << 20;
// Elements of masked weights held at a time: 256 MB of float.
constexpr int64_t kMaskedWeights = int64_t(64) << 20;

template <typename S>
class WeightMasks final : public Mixture<S> {
  using typename Mixture<S>::A;
  using Mixture<S>::p;
  using Mixture<S>::K;

 public:
  explicit WeightMasks(const Problem& problem) : Mixture<S>(problem, kLogitsUnderWeightMasks) {}

 private:
  void prepare_forward() override {
    held = launches_cost(p.device()) ? std::clamp<int64_t>(kMaskedWeights / (p.V * p.H), 1, K) : 1;
    masked = Buffer<S>({held, p.V, p.H}, p.storage());
  }

  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    for (int64_t k = 0; k < K; ++k)
      ConstantMatrix<S>(p.precision, masked_weight(t, k), true, 1, 1)
          .multiply(rows, top + b * p.H, this->logits() + k * rows * p.V, this->bias());
  }

  void decode_back(int64_t t, int64_t b, int64_t rows) override {
    for (int64_t k = 0; k < K; ++k)
      ConstantMatrix<S>(p.precision, masked_weight(t, k), false, 1, 1)
          .multiply(rows, this->logits() + k * rows * p.V, this->dh(b), nullptr,
                    /*accumulate=*/k > 0);
  }

  // [V,H] of sample k, made together with those held beside it.
  at::Tensor masked_weight(int64_t t, int64_t k) {
    const int64_t first = k / held * held;
    if (masked_time != this->time(t) || masked_first != first) {
      apply_masks(t, first, std::min(held, K - first), weight(), masked());
      masked_time = this->time(t);
      masked_first = first;
    }
    return masked.tensor()[k - first];
  }

  // from [V,H] under the masks of samples [first, first + count) -> to [count,V,H]
  void apply_masks(int64_t t, int64_t first, int64_t count, const S* from, S* to) const {
    MaskRows<S> mask = this->mask_at(t);
    mask.samples = count;
    mask.rows = p.V;
    mask.first_sample = static_cast<uint32_t>(first);
    mask.in = from;
    mask.out = to;
    this->kernels.mask_rows(this->launch, mask);
  }
  const S* weight() const { return p.decoders[0].weight.template const_data_ptr<S>(); }

  // ---- backward

  void prepare_backward() override { masked = Buffer<S>({1, p.V, p.H}, p.storage()); }
  void draw_masks(int64_t t, int64_t, int64_t) override { backward_t = t; }
  void decode_sample(int64_t k, const at::Tensor& x, A* out, bool with_bias) override {
    apply_masks(backward_t, k, 1, weight(), masked());
    ConstantMatrix<S>(p.precision, masked.tensor()[0], true, 1, 1)
        .multiply(x.size(0), x.template const_data_ptr<S>(), out,
                  with_bias ? this->bias() : nullptr);
  }
  void decode_sample_back(int64_t k, const at::Tensor& l_bar, const at::Tensor& top_bar) override {
    apply_masks(backward_t, k, 1, weight(), masked());
    ConstantMatrix<S>(p.precision, masked.tensor()[0], false, 1, 1)
        .multiply(l_bar.size(0), l_bar.template const_data_ptr<S>(),
                  top_bar.template mutable_data_ptr<A>(), nullptr, /*accumulate=*/true);
  }
  void collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) override {
    const at::Tensor product = masked.tensor()[0].zero_();
    add_outer<S>(p.precision, product, directions, x);
    apply_masks(backward_t, k, 1, masked(), masked());
    this->wanted.weight.add_(product);
  }

  int64_t held = 1;                             // samples whose weights are masked together
  Buffer<S> masked;                             // [held,V,H]
  int64_t masked_time = -1, masked_first = -1;  // what is in `masked`
  int64_t backward_t = 0;
};

}  // namespace

template <typename S>
std::unique_ptr<Signal<S>> make_weight_masks(const Problem& problem) {
  return std::make_unique<WeightMasks<S>>(problem);
}

template std::unique_ptr<Signal<float>> make_weight_masks(const Problem&);
template std::unique_ptr<Signal<double>> make_weight_masks(const Problem&);

}  // namespace fused_recoder
