// The mean of K predictions: CUDA kernels against CPU kernels.
#include "checks.h"
#include "mixture.cuh"

namespace checks {
namespace {

using namespace fused_recoder;

struct Shape {
  int64_t samples, rows, vocab;
  int logits_offset, other_offset;  // elements by which pointers are misaligned
  int threads;                      // 0: as the kernel table plans it
};

const Shape kShapes[] = {
    {1, 1, 10, 0, 0, 0},    // one prediction: the entropy
    {3, 2, 11, 0, 0, 0},    // rows that start anywhere
    {2, 3, 64, 0, 0, 0},    // aligned throughout
    {4, 2, 64, 1, 1, 0},    // equally misaligned
    {2, 2, 64, 1, 2, 0},    // differently misaligned
    {3, 1, 700, 3, 3, 96},  // several rounds
    {2, 2, 301, 0, 0, 33},  // a warp of one lane
    {3, 2, 61, 0, 1, 5},    // less than a warp
};

enum Special { kOrdinary, kOneImpossible, kImpossible, kConfident, kNan };

// [K,B,V]; something special in the last row.
template <typename A>
Both<A> make_logits(const Shape& shape, int special) {
  const int64_t K = shape.samples, B = shape.rows, V = shape.vocab;
  Both<A> logits = random_values<A>(K * B * V, 8, shape.logits_offset);
  for (int64_t k = 0; k < K; ++k) {
    const int64_t row = (k * B + B - 1) * V;
    if (special == kOneImpossible && k == 0) logits.set(row, -INFINITY);
    if (special == kImpossible) logits.set(row + 1, -INFINITY);
    if (special == kConfident) logits.set(row + V / 2, 300);
    if (special == kNan && k == 0) logits.set(row + V / 3, NAN);
  }
  return logits;
}

// variant bits: 1 direction, 2 in place, 4 a common part, 8 one row of it for all, 16 sum
template <typename S>
void check_mixture(const Shape& shape, int special, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = "mixture_signal <" + std::to_string(sizeof(S)) + "> samples " +
              std::to_string(shape.samples) + " rows " + std::to_string(shape.rows) + " vocab " +
              std::to_string(shape.vocab) + " variant " + std::to_string(variant) + " special " +
              std::to_string(special);
  const int64_t K = shape.samples, B = shape.rows, V = shape.vocab;
  const bool directed = variant & 1, in_place = directed && variant & 2 && std::is_same_v<S, A>;
  const auto logits = make_logits<A>(shape, special);
  const auto direction =
      directed && !in_place ? unwritten<S>(K * B * V, shape.other_offset) : absent<S>();
  const auto log_mean = unwritten<A>(B * V, shape.other_offset);
  const auto delta = unwritten<A>(B);
  const int64_t stride = variant & 8 ? 0 : V;
  const auto common =
      variant & 4 ? random_values<A>(stride == 0 ? V : B * V, 2, shape.other_offset) : absent<A>();
  const auto sum = directed && variant & 16 ? unwritten<S>(B * V, shape.other_offset) : absent<S>();
  MixtureSignal<S> p{K,
                     B,
                     V,
                     logits.cuda.data(),
                     direction.cuda.data(),
                     log_mean.cuda.data(),
                     delta.cuda.data(),
                     common.cuda.data(),
                     stride,
                     sum.cuda.data()};
  MixtureSignal<A> q{K,
                     B,
                     V,
                     logits.cpu.data(),
                     direction.cpu.data(),
                     log_mean.cpu.data(),
                     delta.cpu.data(),
                     common.cpu.data(),
                     stride,
                     sum.cpu.data()};
  if (in_place) {
    p.direction = reinterpret_cast<S*>(p.logits);
    q.direction = q.logits;
  }
  expect_launches(1, [&] {
    if (shape.threads == 0)
      cuda_table<S>().mixture_signal({}, p);
    else
      cuda::launch_mixture_signal<S>(nullptr, p, shape.threads);
  });
  cpu_table<A>().mixture_signal(cpu_launch(), q);
  expect_close("delta", delta, 16, 1);
  expect_close("log_mean", log_mean, 8, 1);
  // log m and its mean nearly cancel.
  expect_close("direction", direction, 32, 1);
  if (in_place) expect_close("direction in place of logits", logits, 32, 1);
  // Kept in S while it is summed up.
  expect_close("sum", sum, 32 + K * Rounding<S>::relative / std::numeric_limits<A>::epsilon(), 1);
}

template <typename A>
void check_backward(const Shape& shape, int special) {
  context() = "mixture_signal_backward <" + std::to_string(sizeof(A)) + "> samples " +
              std::to_string(shape.samples) + " rows " + std::to_string(shape.rows) + " vocab " +
              std::to_string(shape.vocab) + " special " + std::to_string(special);
  const int64_t K = shape.samples, B = shape.rows, V = shape.vocab;
  const auto logits = make_logits<A>(shape, special);
  const auto u_bar = random_values<A>(K * B * V, 1, shape.other_offset);
  const auto log_mean = unwritten<A>(B * V, shape.other_offset);
  const auto slope = unwritten<A>(B * V, shape.other_offset);
  const MixtureSignalBackward<A> p{
      K, B, V, logits.cuda.data(), u_bar.cuda.data(), log_mean.cuda.data(), slope.cuda.data()};
  expect_launches(1, [&] {
    if (shape.threads == 0)
      cuda_table<A>().mixture_signal_backward({}, p);
    else
      cuda::launch_mixture_signal_backward<A>(nullptr, p, shape.threads);
  });
  cpu_table<A>().mixture_signal_backward(
      cpu_launch(),
      {K, B, V, logits.cpu.data(), u_bar.cpu.data(), log_mean.cpu.data(), slope.cpu.data()});
  expect_close("u", logits, 32, 1);
  expect_close("cotangents of the logits", u_bar, 32, 1);
}

constexpr Shape kThesis{3, kThesisRows, kThesisVocab, 0, 0, 0};

template <typename A>
void backward() {
  if (at_thesis_shape()) return check_backward<A>(kThesis, kOrdinary);
  int next = 0;
  for (const Shape& shape : kShapes)
    for (int i = 0; i < (kThoroughly ? 5 : 1); ++i, ++next) check_backward<A>(shape, next % 5);
}

template <typename S>
void mixtures() {
  if (at_thesis_shape()) return check_mixture<S>(kThesis, kOrdinary, 1);
  int next = 0;
  for (const Shape& shape : kShapes)
    for (int i = 0; i < (kThoroughly ? 8 : 1); ++i, ++next)
      check_mixture<S>(shape, next % 5, next * 13 % 32);
}

const Register kChecks[] = {
    {"mixture_signal_float", mixtures<float>},
    {"mixture_signal_double", mixtures<double>},
    {"mixture_signal_half", mixtures<__half>},
    {"mixture_signal_bfloat16", mixtures<__nv_bfloat16>},
    {"mixture_signal_backward_float", backward<float>},
    {"mixture_signal_backward_double", backward<double>},
};

}  // namespace
}  // namespace checks
