// The sequence driver, forward: LSTM step, signal, recoding gradient, recoding step, for each t.
// Knows no device: kernels come from the table, GEMMs from ConstantMatrix (context.h).
#pragma once

#include <memory>

#include "classifiers.h"
#include "context.h"
#include "loss.h"
#include "ops.h"
#include "signal_stage.h"
#include "step_network.h"

namespace fused_recoder {

template <typename S>
class Forward {
 public:
  using A = typename AccumulateIn<S>::type;
  struct Keep {
    bool states;         // everything the backward pass needs
    bool step_grads;     // also what the gradient of the step size needs
    bool decoder_grads;  // also the gradient of the loss in the decoder
    bool trace;
  };
  // Matrices are packed for `calls` steps (T if 0). A stage of one's own takes the place of the
  // signal's.
  Forward(const Sequence& sequence, const Keep& keep, int64_t calls = 0,
          std::unique_ptr<SignalStage<S>> own_stage = nullptr);
  ForwardResult run();

  // The same in single steps, for a sequence of one step whose input and states are replaced in
  // place (reader.cpp).
  void read_input();
  void cells(int64_t t);
  void recode(int64_t t);
  // What the signal reads: behind the output's dropout, or (MC Dropout) before it.
  const S* signal_input(int64_t t) const {
    return s.options.signal_sees_output_dropout() ? above(s.L - 1, t) : raw_h(s.L - 1, t);
  }
  const Buffer<S>& outputs() const { return output; }                         // [T,R,H]
  const Buffer<A>& deltas() const { return delta; }                           // [T,B]
  at::Tensor final_h() const { return h.tensor().select(1, slot(s.T - 1)); }  // [L,R,H]
  at::Tensor final_c() const { return c.tensor().select(1, slot(s.T - 1)); }
  // The states of the last step before it was recoded, [L,R,H].
  at::Tensor raw_states(bool of_c) const;

 private:
  void recode_decoded(int64_t t);
  void recode_classified(int64_t t);
  void choose_steps(int64_t t, const typename SignalStage<S>::Gradient& gradient);
  void open_gate(int64_t t);
  // The parts of a recoding step that do not depend on where the gradient comes from.
  Recode<S> recode_layer(int64_t l, int64_t t) const;
  ForwardResult result(Losses losses);
  at::Tensor alphas() const;  // [L,S,T,R] the steps taken: 0 where a row was not recoded

  // States are kept for all steps where they are saved, else for this step and the last.
  int64_t slot(int64_t t) const { return save ? t : t % 2; }
  const S* h_before(int64_t l, int64_t t) const { return t > 0 ? h(l, slot(t - 1)) : h0(l); }
  const A* c_before(int64_t l, int64_t t) const { return t > 0 ? c(l, slot(t - 1)) : c0(l); }
  // Gates of layer 0 start as the projected inputs of all steps; those of the others are kept
  // only where they are saved.
  A* gates_of(int64_t l, int64_t t) const {
    return save ? gates(l, t) : l == 0 ? projected(t) : gates(l, 0);
  }
  S* layer_input_of(int64_t l, int64_t t) const { return layer_inputs(l, save ? t : 0); }

  const A* bias_of(int64_t l) const {  // [4H] or null
    return s.layers[l].bias.defined() ? s.layers[l].bias.const_data_ptr<A>() : nullptr;
  }
  bool drops_between_layers() const { return s.options.layer_p() > 0; }

  // Where the unrecoded states of step t are: in the place where they are needed last, so that
  // nothing is copied.
  S* raw_h(int64_t l, int64_t t) const {
    if (!recodes_h) return h(l, slot(t));
    if (l < s.L - 1) return drops_between_layers() ? h_raw(l) : layer_input_of(l, t);
    return output_is_raw ? output(t) : h_raw(l);
  }
  A* raw_c(int64_t l, int64_t t) const { return recodes_c ? c_raw(l) : c(l, slot(t)); }
  // What layer l hands up: null where it is raw_h itself.
  S* up(int64_t l, int64_t t) const {
    if (l < s.L - 1) return drops_between_layers() ? layer_input_of(l, t) : nullptr;
    if (s.options.output_is_recoded()) return decoder_input();
    return output_is_raw ? nullptr : output(t);
  }
  const S* above(int64_t l, int64_t t) const {
    const S* handed = up(l, t);
    return handed != nullptr ? handed : raw_h(l, t);
  }
  StepSize<A> step_of(int64_t l, int64_t state, int64_t t) const;
  const uint8_t* active_of(int64_t t) const { return open ? open(t) : active(t); }
  int64_t index_c() const { return s.options.recode_h ? 1 : 0; }  // of c among the recoded states

  const Sequence& s;
  const bool save, trace, recodes_h, recodes_c, output_is_raw;
  const Kernels<S>& kernels;
  const Launch launch;
  const at::TensorOptions storage, accum;

  std::vector<ConstantMatrix<S>> from_below;   // [I or H -> 4H] by layer
  std::vector<ConstantMatrix<S>> from_hidden;  // [H -> 4H]
  std::vector<ConstantMatrix<S>> to_below;  // [4H -> H] gradients of the gates to the layer below
  std::unique_ptr<SignalStage<S>> stage;
  std::unique_ptr<Classifiers<S>> classifiers;
  std::vector<StepNetwork<S>> step_network;  // [L*S]

  Buffer<S> output;              // [T,R,H]
  Buffer<A> delta;               // [T,B]
  Buffer<A> delta_after;         // [T,B] trace
  Buffer<A> grad_norm;           // [L,S,T,R] trace
  Buffer<A> sizes;               // [L,S,T,R] predicted, [1,1,T,R] backtracking
  Buffer<S> h0;                  // [L,R,H]
  Buffer<A> c0;                  // [L,R,H]
  Buffer<S> h;                   // [L, T or 2, R, H] recoded
  Buffer<A> c;                   // [L, T or 2, R, H] recoded
  Buffer<A> gates;               // [L, T or 1, R, 4H]
  Buffer<A> projected;           // [T,R,4H] (saved: gates of layer 0)
  Buffer<S> layer_inputs;        // [L-1, T or 1, R, H]
  Buffer<S> h_raw;               // [L,R,H]
  Buffer<A> c_raw;               // [L,R,H]
  Buffer<S> decoder_input;       // [R,H]
  Buffer<S> h_masked;            // [R,H] under a held recurrent mask
  Buffer<A> dh;                  // [R,H]
  Buffer<S> dgates;              // [R,4H]
  Buffer<A> no_gradient;         // [R,H] zeros
  Buffer<A> step;                // [L,S]
  Buffer<A> step_grads;          // [L,S,T,R,H]
  Buffer<A> grad_h;              // [L,T,R,H] exact
  Buffer<uint8_t> live, active;  // [T,R]
  Buffer<uint8_t> open;          // [T,R] with a gate: active and above the threshold
  Buffer<uint8_t> settled;       // [B] backtracking
  Buffer<S> trial;               // [R,H] the state whose signal is the one after recoding
  Buffer<A> trial_delta;         // [B]
  SharedLoss<S> shared;
  Buffer<A> loss_grads;  // [T,R,H]
  LossGradients decoder_grads;
};

}  // namespace fused_recoder
