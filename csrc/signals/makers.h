// The families of signals, one file each. Who picks among them: family.cpp.
#pragma once

#include <memory>

#include "signal.h"

namespace fused_recoder {

// nll, surprisal, entropy, an ensemble with mean logits: one decoder, one prediction.
template <typename S>
std::unique_ptr<Signal<S>> make_one_prediction(const Problem& problem);

// The entropy of the mean of K predictions.
// MC Dropout: a mask of H units per instance (or for all of them), time step and sample; ...
template <typename S>
std::unique_ptr<Signal<S>> make_unit_masks(const Problem& problem, bool shared);
// ... that for all of them, multiplied column by column, ...
template <typename S>
std::unique_ptr<Signal<S>> make_shared_masks(const Problem& problem);
// ... or through the libraries of the device; ...
template <typename S>
std::unique_ptr<Signal<S>> make_gathered_masks(const Problem& problem);
// ... a mask of V x H weights per time step and sample.
template <typename S>
std::unique_ptr<Signal<S>> make_weight_masks(const Problem& problem);
// Ensembles (K decoders of one state) and variational RNNs (one decoder of K states).
template <typename S>
std::unique_ptr<Signal<S>> make_heads(const Problem& problem);

// Weak supervision: classifiers of the states themselves.
template <typename S>
std::unique_ptr<Signal<S>> make_classifiers(const Problem& problem);
void check_classifiers(const Arguments& arguments, Problem& problem);

}  // namespace fused_recoder
