// MC Dropout with one mask per time step and sample for the whole batch: only the columns of W that
// it drops (or keeps) are multiplied.
#include "makers.h"
#include "mixture.h"

namespace fused_recoder {
namespace {

template <typename S>
class SharedMasks final : public UnitMaskedMixture<S> {
  using typename Mixture<S>::A;
  using Mixture<S>::p;
  using Mixture<S>::K;

 public:
  explicit SharedMasks(const Problem& problem) : UnitMaskedMixture<S>(problem, /*shared=*/true) {}

 private:
  void prepare_forward() override {
    const at::Tensor& weight = p.decoders[0].weight;
    to_vocab =
        ConstantMatrix<S>(Precision::kSame, weight, true, /*calls=*/4 + p.T, K * this->block);
    transposed = weight.t().contiguous();
    scratch = Buffer<S>({K + 1, this->block, p.H}, p.storage());
    units = Buffer<int32_t>({K, p.H}, p.storage().dtype(at::kInt));
    counts = Buffer<int32_t>({K}, p.storage().dtype(at::kInt));
    if (!lists().dropped) return;
    to_hidden = ConstantMatrix<S>(Precision::kSame, weight, false, p.T, this->block);
    u_sum = Buffer<S>({this->block, p.V}, p.storage());
  }

  void decode(int64_t t, const S* top, int64_t b, int64_t rows) override {
    list_units(t);
    SharedDecode<S> k{};
    k.samples = K;
    k.rows = rows;
    k.hidden = p.H;
    k.vocab = p.V;
    k.lists = lists();
    k.h = top + b * p.H;
    k.packed = to_vocab.packed();
    k.bias = this->bias();
    k.scratch = scratch();
    k.logits = this->logits();
    this->kernels.shared_decode(this->launch, k);
  }

  void complete(MixtureSignal<S>& k) override {
    if (lists().dropped && k.direction != nullptr) k.direction_sum = u_sum();
  }

  void decode_back(int64_t, int64_t b, int64_t rows) override {
    if (lists().dropped) to_hidden.multiply(rows, u_sum(), this->dh(b));
    SharedDecodeBack<S> k{};
    k.samples = K;
    k.rows = rows;
    k.hidden = p.H;
    k.vocab = p.V;
    k.lists = lists();
    k.u = this->logits();
    k.weight_t = transposed.template const_data_ptr<S>();
    k.dh = this->dh(b);
    this->kernels.shared_decode_back(this->launch, k);
  }

  UnitLists lists() const {
    return {units(), counts(), p.spec.sample_p <= 0.5, 1 / (1 - p.spec.sample_p)};
  }

  // The columns of this step's masks, once per step.
  void list_units(int64_t t) {
    if (this->time(t) == listed_time) return;
    listed_time = this->time(t);
    const Dropout dropout = p.sample_dropout();
    const bool dropped = lists().dropped;
    for (int64_t k = 0; k < K; ++k) {
      int32_t* list = units(k);
      int32_t count = 0;
      for (int64_t j = 0; j < p.H; j += 4) {
        float factor[4] = {1, 1, 1, 1};
        if (dropout.seed != nullptr)
          dropout_quad<float>(dropout, this->time(t), static_cast<uint32_t>(k), 0,
                              static_cast<uint32_t>(j / 4), factor);
        for (int64_t i = 0; i < 4 && j + i < p.H; ++i)
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

}  // namespace

template <typename S>
std::unique_ptr<Signal<S>> make_shared_masks(const Problem& problem) {
  return std::make_unique<SharedMasks<S>>(problem);
}

template std::unique_ptr<Signal<float>> make_shared_masks(const Problem&);
template std::unique_ptr<Signal<double>> make_shared_masks(const Problem&);

}  // namespace fused_recoder
