// Word-by-word reading: weights are packed once, states stay where they are, and a gold signal is
// completed when the gold token arrives as the next word. torch.classes.fused_recoder.Reader; used
// by fused_recoder/reader.py, which makes a new one when a parameter changes.
#pragma once

#include <torch/custom_class.h>

#include <memory>

#include "../engine/problem.h"
#include "guard.h"

namespace fused_recoder {

// What a reader does, whatever it computes in.
class StepReader {
 public:
  virtual ~StepReader() = default;
  virtual at::Tensor feed(const at::Tensor& tokens, const OptionalTensor& labels) = 0;
  virtual void finish(const at::Tensor& gold) = 0;
  virtual at::Tensor h() const = 0;
  virtual at::Tensor c() const = 0;
  virtual at::Tensor delta() const = 0;
  virtual int64_t time() const = 0;
  virtual bool pending() const = 0;
};

class Reader : public torch::CustomClassHolder {
 public:
  // embedding [V,I]; the rest as in struct Arguments. `spec` also says at what time it begins and
  // with what probability it recodes.
  Reader(const at::Tensor& embedding, const at::Tensor& h0, const at::Tensor& c0,
         std::vector<at::Tensor> weights, const at::Tensor& decoder_weight,
         const OptionalTensor& decoder_bias, std::vector<at::Tensor> signal,
         std::vector<at::Tensor> step, const OptionalTensor& gate, const OptionalTensor& seed,
         std::string spec);

  // Reads tokens [B] and predicts the next: log probabilities [B,V]. Completes the recoding of the
  // step before, whose gold tokens these are. labels [B]: of classifiers.
  at::Tensor feed(const at::Tensor& tokens, const OptionalTensor& labels) {
    const OpGuard guard(tokens);
    return reader_->feed(tokens, labels);
  }
  // Completes the recoding of the last step without reading on.
  void finish(const at::Tensor& gold) {
    const OpGuard guard(gold);
    reader_->finish(gold);
  }
  at::Tensor h() const { return reader_->h(); }  // [L,R,H] as recoded so far
  at::Tensor c() const { return reader_->c(); }
  at::Tensor delta() const { return reader_->delta(); }  // [B] of the last completed recoding
  int64_t time() const { return reader_->time(); }       // steps read
  bool pending() const { return reader_->pending(); }    // the last step waits for its gold token

 private:
  std::unique_ptr<StepReader> reader_;
};

}  // namespace fused_recoder
