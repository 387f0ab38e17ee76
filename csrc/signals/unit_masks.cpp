// MC Dropout with a mask per instance (or one for all), time step and sample: K rows per instance
// through one decoder.
#include "makers.h"
#include "mixture.h"

namespace fused_recoder {
namespace {

template <typename S>
class UnitMasks final : public UnitMaskedMixture<S> {
  using typename Mixture<S>::A;
  using Mixture<S>::p;
  using Mixture<S>::K;
  using UnitMaskedMixture<S>::shared;

 public:
  UnitMasks(const Problem& problem, bool shared) : UnitMaskedMixture<S>(problem, shared) {}

 private:
  void prepare_forward() override {
    const at::Tensor& weight = p.decoders[0].weight;
    to_vocab = ConstantMatrix<S>(p.precision, weight, true, p.T, K * this->block);
    to_hidden = ConstantMatrix<S>(p.precision, weight, false, p.T, K * this->block);
    masked = Buffer<S>({K, this->block, p.H}, p.storage());
    back = Buffer<A>({K, this->block, p.H}, p.accum());
  }

  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    MaskRows<S> mask = this->mask_at(t);
    mask.samples = K;
    mask.rows = rows;
    mask.shared = shared;
    mask.first_row = static_cast<uint32_t>(shared ? 0 : b);
    mask.in = top + b * p.H;
    mask.out = masked();
    this->kernels.mask_rows(this->launch, mask);
    to_vocab.multiply(K * rows, masked(), this->logits(), this->bias());
  }

  void decode_back(int64_t t, int64_t b, int64_t rows) override {
    to_hidden.multiply(K * rows, this->logits(), back());
    MaskSum<S> sum{};
    sum.samples = K;
    sum.rows = rows;
    sum.units = p.H;
    sum.dropout = p.sample_dropout();
    sum.time = this->time(t);
    sum.shared = shared;
    sum.first_row = static_cast<uint32_t>(shared ? 0 : b);
    sum.in = back();
    sum.out = this->dh(b);
    this->kernels.mask_sum(this->launch, sum);
  }

  ConstantMatrix<S> to_vocab, to_hidden;
  Buffer<S> masked;  // [K,block,H]
  Buffer<A> back;    // [K,block,H]
};

}  // namespace

template <typename S>
std::unique_ptr<Signal<S>> make_unit_masks(const Problem& problem, bool shared) {
  return std::make_unique<UnitMasks<S>>(problem, shared);
}

template std::unique_ptr<Signal<float>> make_unit_masks(const Problem&, bool);
template std::unique_ptr<Signal<double>> make_unit_masks(const Problem&, bool);

}  // namespace fused_recoder
