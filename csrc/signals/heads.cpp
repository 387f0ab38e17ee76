// Ensembles and variational RNNs: predictions of K decoders for one state, or of one decoder for K
// states.
#include "makers.h"
#include "mixture.h"

namespace fused_recoder {
namespace {

template <typename S>
class Heads final : public Mixture<S> {
  using typename Mixture<S>::A;
  using Mixture<S>::p;
  using Mixture<S>::K;

 public:
  explicit Heads(const Problem& problem) : Mixture<S>(problem) {}

 private:
  bool one_state() const { return p.ensemble; }
  int64_t decoder(int64_t k) const { return one_state() ? k : 0; }
  int64_t row(int64_t k, int64_t b) const { return one_state() ? b : k * p.B + b; }
  // One decoder for all rows there are: one product.
  bool at_once(int64_t rows) const { return !one_state() && rows == p.B; }

  void pack(int64_t calls) {
    for (const LinearMap& decoder : p.decoders) {
      to_vocab.emplace_back(p.precision, decoder.weight, true, calls, this->block);
      to_hidden.emplace_back(p.precision, decoder.weight, false, p.T, this->block);
    }
  }

  void prepare_forward() override { pack(p.T); }

  void decode(int64_t, const S* top, int64_t b, int64_t rows) override {
    if (at_once(rows)) return to_vocab[0].multiply(p.R, top, this->logits(), this->bias());
    for (int64_t k = 0; k < K; ++k)
      to_vocab[decoder(k)].multiply(rows, top + row(k, b) * p.H, this->logits() + k * rows * p.V,
                                    this->bias(decoder(k)));
  }

  void decode_back(int64_t, int64_t b, int64_t rows) override {
    if (at_once(rows)) return to_hidden[0].multiply(p.R, this->logits(), this->dh());
    for (int64_t k = 0; k < K; ++k)
      to_hidden[decoder(k)].multiply(rows, this->logits() + k * rows * p.V, this->dh(row(k, b)),
                                     nullptr, /*accumulate=*/one_state() && k > 0);
  }

  // ---- backward

  void prepare_backward() override { pack(2 * p.T); }

  void decode_sample(int64_t k, const at::Tensor& x, A* out, bool with_bias) override {
    to_vocab[decoder(k)].multiply(x.size(0), x.template const_data_ptr<S>(), out,
                                  with_bias ? this->bias(decoder(k)) : nullptr);
  }
  void decode_sample_back(int64_t k, const at::Tensor& l_bar, const at::Tensor& top_bar) override {
    to_hidden[decoder(k)].multiply(l_bar.size(0), l_bar.template const_data_ptr<S>(),
                                   top_bar.template mutable_data_ptr<A>(), nullptr,
                                   /*accumulate=*/true);
  }
  void collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) override {
    const at::Tensor& weight = this->wanted.weight;
    add_outer<S>(p.precision, one_state() ? weight[k] : weight, directions, x);
  }

  std::vector<ConstantMatrix<S>> to_vocab, to_hidden;
};

}  // namespace

template <typename S>
std::unique_ptr<Signal<S>> make_heads(const Problem& problem) {
  return std::make_unique<Heads<S>>(problem);
}

template std::unique_ptr<Signal<float>> make_heads(const Problem&);
template std::unique_ptr<Signal<double>> make_heads(const Problem&);

}  // namespace fused_recoder
