// Backtracking, the gate, gold tokens that come late: CUDA kernels against CPU kernels.
#include "gold_arrives.cuh"
#include "trial.cuh"
#include "unit_shapes.h"

namespace checks {
namespace {

using namespace fused_recoder;

// variant bits: 1 recodes h, 2 row_scale, 4 dropout
template <typename S>
void check_trial_step(const Shape& shape, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("trial_step", sizeof(S), shape) + std::to_string(variant);
  const int64_t B = shape.rows, H = shape.hidden;
  const int offset = shape.offset;
  const auto gates = random_values<A>(B * 4 * H, 1, offset);
  const auto c = random_values<A>(B * H, 2, offset);
  const auto h = random_values<S>(B * H, 1, offset);
  const auto dh = random_values<A>(B * H, 1, offset);
  const auto row_scale = variant & 2 ? random_values<A>(B, 2) : absent<A>();
  const auto alpha = random_values<A>(B, 1);
  const auto trial = unwritten<S>(B * H, offset);
  const Dropout dropout = variant & 4 ? kDropout : kNoDropout;
  const bool recodes_h = variant & 1;
  const TrialStep<S> p{B,
                       H,
                       gates.cuda.data(),
                       c.cuda.data(),
                       h.cuda.data(),
                       dh.cuda.data(),
                       row_scale.cuda.data(),
                       dropout,
                       kTime,
                       recodes_h,
                       alpha.cuda.data(),
                       trial.cuda.data()};
  const TrialStep<A> q{B,
                       H,
                       gates.cpu.data(),
                       c.cpu.data(),
                       h.cpu.data(),
                       dh.cpu.data(),
                       row_scale.cpu.data(),
                       dropout,
                       kTime,
                       recodes_h,
                       alpha.cpu.data(),
                       trial.cpu.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().trial_step(kStream, p);
    else
      cuda::launch_trial_step(nullptr, p, shape.plan);
  });
  cpu_table<A>().trial_step(cpu_launch(), q);
  expect_close("trial", trial, 8, 1);
}

template <typename S>
void trial_steps() {
  for_shapes(8, 4, check_trial_step<S>);
}

// More rows than a block has threads, too.
template <typename A>
void verdicts() {
  for (const int64_t B : {1, 5, 200})
    for (const double shrink : {0.5, 0.0}) {
      context() = "trial_verdict rows " + std::to_string(B);
      const int64_t K = 3;
      const auto delta = random_values<A>(B, 1), trial = random_values<A>(B, 1);
      const auto settled = some_rows(B, 0);
      const auto alpha = random_values<A>(K * B, 1);
      expect_launches(1, [&] {
        cuda_table<A>().trial_verdict(kStream, {K, B, delta.cuda.data(), trial.cuda.data(),
                                                A(shrink), settled.cuda.data(), alpha.cuda.data()});
      });
      cpu_table<A>().trial_verdict(cpu_launch(), {K, B, delta.cpu.data(), trial.cpu.data(),
                                                  A(shrink), settled.cpu.data(), alpha.cpu.data()});
      expect_equal("settled", settled);
      expect_close("alpha", alpha, 0);
    }
}

template <typename A>
void gates() {
  for (const int64_t B : {1, 5, 200})
    for (const bool masked : {false, true}) {
      context() = "gate rows " + std::to_string(B);
      const int64_t K = 2;
      const auto delta = random_values<A>(B, 1), threshold = values<A>({0.1});
      const auto active = masked ? some_rows(B, 0) : absent<uint8_t>();
      const auto open = unwritten<uint8_t>(K * B);
      expect_launches(1, [&] {
        cuda_table<A>().gate(kStream, {K, B, delta.cuda.data(), threshold.cuda.data(),
                                       active.cuda.data(), open.cuda.data()});
      });
      cpu_table<A>().gate(cpu_launch(), {K, B, delta.cpu.data(), threshold.cpu.data(),
                                         active.cpu.data(), open.cpu.data()});
      expect_equal("open", open);
    }
}

// variant bits: 1 surprisal, 2 some ignored
template <typename S>
void check_gold_arrives(const Shape& shape, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("gold_arrives", sizeof(S), shape) + std::to_string(variant);
  const int64_t B = shape.rows, H = shape.hidden, V = 11;
  const int offset = shape.offset;
  const SignalKind kind = variant & 1 ? SignalKind::kSurprisal : SignalKind::kNll;
  const auto logits = random_values<A>(B * V, 4), log_sum = random_values<A>(B, 1);
  const auto expected = random_values<A>(B * H, 1, offset);
  const auto weight = random_values<S>(V * H, 1, offset);
  auto targets = unwritten<int64_t>(B);
  for (int64_t b = 0; b < B; ++b) targets.set(b, variant & 2 && b % 2 == 0 ? -100 : 7 * b % V);
  for (int64_t b = 0; b < B; ++b) log_sum.cuda[b] = log_sum.cpu[b] = A(5);  // log p below 0
  const auto dh = unwritten<A>(B * H, offset);
  const auto delta = unwritten<A>(B), scale = unwritten<A>(B);
  const GoldArrives<S> p{B,
                         H,
                         V,
                         {kind},
                         logits.cuda.data(),
                         log_sum.cuda.data(),
                         expected.cuda.data(),
                         targets.cuda.data(),
                         weight.cuda.data(),
                         dh.cuda.data(),
                         delta.cuda.data(),
                         scale.cuda.data()};
  const GoldArrives<A> q{B,
                         H,
                         V,
                         {kind},
                         logits.cpu.data(),
                         log_sum.cpu.data(),
                         expected.cpu.data(),
                         targets.cpu.data(),
                         weight.cpu.data(),
                         dh.cpu.data(),
                         delta.cpu.data(),
                         scale.cpu.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().gold_arrives(kStream, p);
    else
      cuda::launch_gold_arrives(nullptr, p, shape.plan);
  });
  cpu_table<A>().gold_arrives(cpu_launch(), q);
  expect_close("dh", dh, 2);
  expect_close("delta", delta, 4, 1);
  expect_close("scale", scale, 4, 1);
}

template <typename S>
void gold() {
  for_shapes(4, 3, check_gold_arrives<S>);
}

const Register kChecks[] = {
    {"trial_step_float", trial_steps<float>},
    {"trial_step_double", trial_steps<double>},
    {"trial_step_half", trial_steps<__half>},
    {"trial_step_bfloat16", trial_steps<__nv_bfloat16>},
    {"trial_verdict_float", verdicts<float>},
    {"trial_verdict_double", verdicts<double>},
    {"gate_float", gates<float>},
    {"gate_double", gates<double>},
    {"gold_arrives_float", gold<float>},
    {"gold_arrives_double", gold<double>},
    {"gold_arrives_half", gold<__half>},
    {"gold_arrives_bfloat16", gold<__nv_bfloat16>},
};

}  // namespace
}  // namespace checks
