// The options of a recoder: one table of fields that both languages read. C++ makes the struct
// below of it, Python the frozen class `RecoderSpec` (fused_recoder/spec.py). They travel as one
// string.
#pragma once

#include <c10/util/string_view.h>

#include <string>
#include <tuple>
#include <vector>

namespace fused_recoder {

// X(type, name, default, meaning)
// clang-format off
#define FR_SPEC_FIELDS(X)                                                                        \
  /* what to lower: csrc/signals */                                                              \
  X(std::string, signal, "none", "its name, or none")                                            \
  X(bool, argmax, false, "gold signals: recode towards the most probable token")                 \
  X(int64_t, samples, 1, "K predictions whose mean counts")                                      \
  X(double, sample_p, 0, "dropout of the samples")                                               \
  X(double, order, 1, "of a Renyi entropy")                                                      \
  X(bool, mean_logits, false, "an ensemble predicts with its mean logits: one decoder")          \
  X(std::vector<int64_t>, classifier_states, {}, "of each: 2 * layer + (1 if it reads c)")       \
  /* how far: csrc/steps */                                                                      \
  X(std::string, step, "given", "how step sizes are found")                                      \
  X(double, shrink, 0.5, "backtracking: the factor between trials")                              \
  X(int64_t, trials, 1, "backtracking: how many at most")                                        \
  /* what is recoded: csrc/cell */                                                               \
  X(bool, recode_h, true, "hidden states are recoded")                                           \
  X(bool, recode_c, true, "cell states are recoded")                                             \
  /* the model */                                                                                \
  X(double, dropout, 0, "between layers")                                                        \
  X(double, output_dropout, 0, "between the top layer and the decoder")                          \
  X(double, probability, 1, "reader: the share of positions that are recoded")                   \
  X(int64_t, time, 0, "of the first time step, for the masks")                                   \
  /* what is wanted of this call */                                                              \
  X(bool, loss, false, "also the nll of the targets")                                            \
  X(bool, trace, false, "also what the recoder did")                                             \
  X(bool, exact, false, "the recoding gradient is differentiated, too")                          \
  X(bool, save, false, "keep what the backward pass needs")                                      \
  X(bool, input_grad, false, "the backward pass gives the gradient of the input")                \
  X(bool, step_grad, false, "... of the step sizes")                                             \
  X(bool, decoder_grad, false, "... of the decoder")
// clang-format on

struct Spec {
#define FR_DECLARE(type, name, initial, meaning) type name = initial;
  FR_SPEC_FIELDS(FR_DECLARE)
#undef FR_DECLARE

  int64_t states() const { return int64_t(recode_h) + int64_t(recode_c); }
};

// "name=value;name=value", fields that are missing have their defaults. Raises ValueError that
// names the field.
Spec parse_spec(c10::string_view encoded);

// (name, Python type, encoded default, meaning) of every field.
std::vector<std::tuple<std::string, std::string, std::string, std::string>> spec_fields();

}  // namespace fused_recoder
