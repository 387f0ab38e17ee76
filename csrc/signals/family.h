// Which signals there are, and what the rest of the engine has to know of each without asking for
// its name. The list itself: family.cpp.
#pragma once

#include <c10/util/string_view.h>

#include <memory>
#include <optional>

#include "../kernels/kernels.h"
#include "../ops/spec.h"

namespace fused_recoder {

struct Arguments;
struct Problem;
template <typename S>
class Signal;

struct SignalFacts {
  bool exists = true;          // false: nothing is recoded
  bool reads_target = false;   // the gold token, or the most probable one
  bool reads_labels = false;   // of classifiers, which read states and no decoder
  bool needs_members = false;  // the decoder is an ensemble's, [K,V,H]
  // Every sample has recurrent states of its own, under masks that are held for the whole sequence.
  bool own_states = false;
  // Its masks act on the undropped top state; other signals see what is predicted from.
  bool masks_top_state = false;
  // What the kernels compute of a row of logits, for signals of one prediction, and the field of
  // the spec that holds the number of such a kind; null: it has none.
  std::optional<SignalKind> row_kind;
  double Spec::* parameter = nullptr;

  bool decodes() const { return exists && !reads_labels; }
  // Signals that see labels predict from the unrecoded state: none may leak.
  bool sees_labels() const { return reads_target || reads_labels; }
  // Of a signal that has a row kind.
  RowSignal row(const Spec& spec) const {
    return {row_kind.value(), parameter == nullptr ? 0 : spec.*parameter};
  }
};

struct SignalFamily {
  const char* name;
  SignalFacts facts;
  void (*check)(const Arguments&, Problem&);  // tensors of its own; null: it has none
  std::unique_ptr<Signal<float>> (*make_f32)(const Problem&);
  std::unique_ptr<Signal<double>> (*make_f64)(const Problem&);
};

// Raises ValueError that lists the names.
const SignalFamily& signal_family(c10::string_view name);

// The signal of a problem that recodes.
template <typename S>
std::unique_ptr<Signal<S>> make_signal(const Problem& problem);

}  // namespace fused_recoder
