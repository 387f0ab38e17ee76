// The entropy of the mean of K predictions: what MC Dropout, ensembles and variational RNNs have in
// common. Instances are taken in blocks, so that K rows of logits each stay within bounds whatever
// K and V are.
#pragma once

#include "decoded.h"

namespace fused_recoder {

// Logits held at a time, in elements: 32 MB of float.
constexpr int64_t kMixtureLogits = int64_t(8) << 20;

template <typename S>
class Mixture : public DecodedSignal<S> {
 public:
  using typename DecodedSignal<S>::A;
  using typename DecodedSignal<S>::TopGradient;
  using typename Signal<S>::Forward;
  using typename Signal<S>::Backward;
  using Signal<S>::p;
  using Signal<S>::kernels;
  using Signal<S>::launch;

  explicit Mixture(const Problem& problem, int64_t logits_held = kMixtureLogits)
      : DecodedSignal<S>(problem), K(problem.spec.samples), logits_held(logits_held) {}

  void begin_forward(const Forward& pass) final;
  void begin_backward(const Backward& pass) final;
  void curvature(int64_t t, const S* top, const S* gradient_bar, A* top_bar) final;

 protected:
  // ---- forward: all samples of a block of instances

  // What decode() needs, now that the block is known.
  virtual void prepare_forward() = 0;
  // logits [K,rows,V] of the instances [b, b + rows)
  virtual void decode(int64_t t, const S* top, int64_t b, int64_t rows) = 0;
  // What the logits that decode() left are still without, and what decode_back() wants beside u.
  virtual void complete(MixtureSignal<S>&) {}
  // dh of these instances, from the directions that took the place of the logits
  virtual void decode_back(int64_t t, int64_t b, int64_t rows) = 0;

  // ---- backward: sample by sample, of a block of instances

  virtual void prepare_backward() = 0;
  // Masks of the instances [b, b + rows) at time step t.
  virtual void draw_masks(int64_t, int64_t, int64_t) {}
  // x [rows,H] -> out [rows,V]
  virtual void decode_sample(int64_t k, const at::Tensor& x, A* out, bool with_bias) = 0;
  // Adds to top_bar [rows,H] what l_bar [rows,V] gives.
  virtual void decode_sample_back(int64_t k, const at::Tensor& l_bar,
                                  const at::Tensor& top_bar) = 0;
  // Adds directions^T [V,rows] * x [rows,H] to the gradient of the weight.
  virtual void collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) = 0;

  const A* bias(int64_t decoder = 0) const { return this->bias_of(p.decoders[decoder]); }
  uint32_t time(int64_t t) const { return static_cast<uint32_t>(p.spec.time + t); }
  // A mask of H units at time step t; rows, samples and memory are left to be filled in.
  MaskRows<S> mask_at(int64_t t) const;

  const int64_t K;
  int64_t block = 0;     // instances at a time
  Buffer<A> logits;      // [K,block,V] (as [K,rows,V]) logits, then u
  Buffer<A> dh;          // [R,H]
  LossGradients wanted;  // backward

 private:
  TopGradient top_gradient(int64_t t, const S* top, A* delta) final;
  void value(int64_t t, const S* top, A* delta) final;
  void mixture(int64_t rows, A* delta, bool direction);
  void add_to_decoder(int64_t k, const at::Tensor& u, const at::Tensor& l_bar, const at::Tensor& v,
                      const at::Tensor& x);
  // The rows of a state tensor [R,H] that sample k reads of the instances [b, b + rows).
  at::Tensor of_sample(const at::Tensor& states, int64_t k, int64_t b, int64_t rows) const {
    return states.narrow(0, (p.R == p.B ? 0 : k * p.B) + b, rows);
  }
  at::Tensor block_of(const Buffer<A>& buffer, int64_t k, int64_t rows) const {  // [rows,V]
    return tensor_at(buffer() + k * rows * p.V, {rows, p.V}, p.device());
  }

  const int64_t logits_held;
  Buffer<A> log_mean;     // [block,V]
  Buffer<A> bars, slope;  // [K,block,V], [block,V] backward
};

// MC Dropout by units: however the forward pass multiplies, backward it is one sample after
// another.
template <typename S>
class UnitMaskedMixture : public Mixture<S> {
 public:
  using typename Mixture<S>::A;
  using Mixture<S>::p;
  using Mixture<S>::K;
  UnitMaskedMixture(const Problem& problem, bool shared) : Mixture<S>(problem), shared(shared) {}

 protected:
  const bool shared;  // one mask for the whole batch

 private:
  void prepare_backward() final;
  void draw_masks(int64_t t, int64_t b, int64_t rows) final;
  void decode_sample(int64_t k, const at::Tensor& x, A* out, bool with_bias) final;
  void decode_sample_back(int64_t k, const at::Tensor& l_bar, const at::Tensor& top_bar) final;
  void collect(int64_t k, const at::Tensor& directions, const at::Tensor& x) final;

  ConstantMatrix<S> sample_to_vocab, sample_to_hidden;
  at::Tensor ones, back;  // [block,H]
  at::Tensor masks;       // [K, rows or 1, H]
};

}  // namespace fused_recoder
