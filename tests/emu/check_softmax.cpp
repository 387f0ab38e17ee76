// Softmax and signals, forward and backward: CUDA kernels against CPU kernels.
#include <cstring>

#include "checks.h"
#include "softmax_signal.cuh"
#include "softmax_signal_backward.cuh"

namespace checks {
namespace {

using namespace fused_recoder;
using cuda::RowPlan;

constexpr RowPlan kPlanned{0, 0};

struct Shape {
  int64_t rows, vocab;
  int logits_offset, other_offset;  // elements by which pointers are misaligned
  RowPlan plan;
};

const Shape kShapes[] = {
    {1, 10, 0, 0, kPlanned},   // the smallest vocabulary
    {5, 11, 0, 0, kPlanned},   // rows that start anywhere
    {3, 64, 0, 0, kPlanned},   // aligned throughout
    {3, 64, 1, 1, kPlanned},   // equally misaligned
    {3, 64, 1, 2, kPlanned},   // differently misaligned
    {2, 1003, 3, 3, {96, 1}},  // several rounds
    {2, 301, 0, 0, {33, 1}},   // a warp of one lane
    {3, 61, 0, 1, {5, 1}},     // less than a warp
    {1, 700, 0, 0, {64, 3}},   // split over blocks
    {2, 701, 5, 5, {40, 4}},   // the same, nothing divisible
    {2, 13, 0, 0, {8, 5}},     // blocks with few columns
    {1, 10, 0, 0, {4, 17}},    // more blocks than columns
};

std::string describe(const char* what, size_t bytes, const Shape& shape) {
  return std::string(what) + " <" + std::to_string(bytes) + "> rows " + std::to_string(shape.rows) +
         " vocab " + std::to_string(shape.vocab) + " offsets " +
         std::to_string(shape.logits_offset) + "," + std::to_string(shape.other_offset) +
         " threads " + std::to_string(shape.plan.threads) + " blocks per row " +
         std::to_string(shape.plan.blocks_per_row) + " variant ";
}

enum Special { kOrdinary, kTies, kSomeMinusInfinity, kConfident, kNoMass, kPlusInfinity, kNan };

// Each row of a kind of its own, where there are enough.
template <typename A>
Both<A> make_logits(const Shape& shape, int first_kind) {
  const int64_t V = shape.vocab;
  Both<A> logits = random_values<A>(shape.rows * V, 8, shape.logits_offset);
  for (int64_t b = 0; b < shape.rows; ++b)
    for (int64_t j = 0; j < V; ++j) {
      const int64_t i = b * V + j;
      switch ((first_kind + b) % 7) {
        case kTies:
          logits.set(i, j % 3);
          break;
        case kSomeMinusInfinity:
          if (j % 4 != 1) logits.set(i, -INFINITY);
          break;
        case kConfident:
          if (j == V / 2) logits.set(i, 200);
          break;
        case kNoMass:
          logits.set(i, -INFINITY);
          break;
        case kPlusInfinity:
          if (j == V - 1) logits.set(i, INFINITY);
          break;
        case kNan:
          if (j == V / 3) logits.set(i, NAN);
          break;
        default:
          break;
      }
    }
  return logits;
}

// Gold tokens, some of them ignored.
Both<int64_t> make_targets(const Shape& shape, bool ignore_some) {
  Both<int64_t> targets = unwritten<int64_t>(shape.rows);
  for (int64_t b = 0; b < shape.rows; ++b)
    targets.set(b, ignore_some && b % 2 == 1 ? -100 : (b + 1) * 7919 % shape.vocab);
  return targets;
}

// Of the exact size; null where rows are not split.
template <typename A>
Array<char> make_scratch(const Shape& shape) {
  const int64_t bytes = shape.plan.threads == 0
                            ? cuda::softmax_scratch<A>(shape.rows, shape.vocab)
                            : shape.rows * shape.plan.blocks_per_row * cuda::kPartialBytes<A>;
  const bool split = shape.plan.threads == 0 ? bytes > 0 : shape.plan.blocks_per_row > 1;
  Array<char> scratch = split ? Array<char>(bytes, 0) : Array<char>();
  if (split) memset(scratch.data(), 0xff, bytes);
  return scratch;
}

// What has a second derivative comes first.
constexpr RowSignal kSignals[] = {{SignalKind::kNll},        {SignalKind::kSurprisal},
                                  {SignalKind::kEntropy},    {SignalKind::kRenyi, 0.5},
                                  {SignalKind::kRenyi, 1.1}, {SignalKind::kSoftmax}};

// Of the whole prediction: u is a difference, and there is no target.
bool is_whole(const RowSignal& signal) {
  return signal.kind == SignalKind::kEntropy || signal.kind == SignalKind::kRenyi;
}

std::string describe(const RowSignal& signal, int first_kind) {
  return " kind " + std::to_string(int(signal.kind)) + " of " + std::to_string(signal.parameter) +
         " rows from " + std::to_string(first_kind);
}

// o - onehot: each element relative to itself, but for p - 1 of a likely target, which has the
// error of the sum over the row. (The CPU's exponential ends where floats lose precision.)
template <typename T>
void expect_probabilities_close(const char* name, const Both<T>& both) {
  constexpr double kSmallest = std::numeric_limits<float>::min();
  expect_within(name, both, 16, [](double cpu) {
    return std::max(std::fabs(cpu),
                    cpu < 0 ? 0.25 : kSmallest / std::numeric_limits<float>::epsilon());
  });
}

// variant bits: 1 targets, 2 some ignored, 4 direction, 8 in place, 16 only delta
template <typename S>
void check_signal(const Shape& shape, const RowSignal& signal, int first_kind, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("softmax_signal", sizeof(S), shape) + std::to_string(variant) +
              describe(signal, first_kind);
  const int64_t B = shape.rows, V = shape.vocab;
  const bool whole = is_whole(signal), open = signal.kind == SignalKind::kSoftmax;
  const bool in_place = variant & 8 && std::is_same_v<S, A>;
  auto logits = make_logits<A>(shape, first_kind);
  if (open)  // a row without mass: -inf on CUDA, NaN on the CPU
    for (int64_t b = 0; b < B; ++b)
      if ((first_kind + b) % 7 == kNoMass) logits.set(b * V, 1);
  const auto targets = variant & 1 && !open ? make_targets(shape, variant & 2) : absent<int64_t>();
  const auto direction =
      variant & 4 && !in_place ? unwritten<S>(B * V, shape.other_offset) : absent<S>();
  const auto delta = unwritten<A>(B);
  const auto scale = variant & 16 ? absent<A>() : unwritten<A>(B);
  const auto log_p = variant & 16 || whole ? absent<A>() : unwritten<A>(B);
  const auto chosen = variant & 16 || whole ? absent<int64_t>() : unwritten<int64_t>(B);
  const Array<char> scratch = make_scratch<A>(shape);
  SoftmaxSignal<S> p{B,
                     V,
                     signal,
                     logits.cuda.data(),
                     targets.cuda.data(),
                     direction.cuda.data(),
                     delta.cuda.data(),
                     scale.cuda.data(),
                     log_p.cuda.data(),
                     chosen.cuda.data(),
                     scratch.data()};
  SoftmaxSignal<A> q{B,
                     V,
                     signal,
                     logits.cpu.data(),
                     targets.cpu.data(),
                     direction.cpu.data(),
                     delta.cpu.data(),
                     scale.cpu.data(),
                     log_p.cpu.data(),
                     chosen.cpu.data(),
                     nullptr};
  if (in_place) {
    p.direction = reinterpret_cast<S*>(p.logits);
    q.direction = q.logits;
  }
  expect_launches(scratch.data() != nullptr ? 2 : 1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().softmax_signal({}, p);
    else
      cuda::softmax_signal_planned<S>(nullptr, p, shape.plan);
  });
  cpu_table<A>().softmax_signal(cpu_launch(), q);
  expect_close("delta", delta, 8, 1);
  expect_close("scale", scale, 8, 1);
  expect_close("log_p", log_p, 8, 1);
  expect_equal("chosen", chosen);
  if (whole) {
    expect_close("direction", direction, 16, 0.1);
    if (in_place) expect_close("direction in place of logits", logits, 16, 0.1);
  } else {
    expect_probabilities_close("direction", direction);
    if (in_place) expect_probabilities_close("direction in place of logits", logits);
  }
}

// variant bits: 1 targets, 2 some ignored, 4 in place, 8 no gradient at delta, 16 one at the loss
template <typename A>
void check_signal_backward(const Shape& shape, const RowSignal& signal, int first_kind,
                           int variant) {
  context() = describe("softmax_signal_backward", sizeof(A), shape) + std::to_string(variant) +
              describe(signal, first_kind);
  const int64_t B = shape.rows, V = shape.vocab;
  const bool in_place = variant & 4;
  const auto logits = make_logits<A>(shape, first_kind);
  const auto targets = variant & 1 ? make_targets(shape, variant & 2) : absent<int64_t>();
  const auto delta_bar = variant & 8 ? absent<A>() : random_values<A>(B, 1);
  const auto loss_bar = variant & 16 ? random_values<A>(B, 1) : absent<A>();
  const auto u_bar = random_values<A>(B * V, 1, shape.other_offset);
  const auto u = in_place ? absent<A>() : unwritten<A>(B * V, shape.other_offset);
  const Array<char> scratch = make_scratch<A>(shape);
  SoftmaxSignalBackward<A> p{B,
                             V,
                             signal,
                             logits.cuda.data(),
                             targets.cuda.data(),
                             delta_bar.cuda.data(),
                             loss_bar.cuda.data(),
                             u_bar.cuda.data(),
                             in_place ? logits.cuda.data() : u.cuda.data(),
                             scratch.data()};
  SoftmaxSignalBackward<A> q{B,
                             V,
                             signal,
                             logits.cpu.data(),
                             targets.cpu.data(),
                             delta_bar.cpu.data(),
                             loss_bar.cpu.data(),
                             u_bar.cpu.data(),
                             in_place ? logits.cpu.data() : u.cpu.data(),
                             nullptr};
  expect_launches(scratch.data() != nullptr ? 2 : 1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<A>().softmax_signal_backward({}, p);
    else
      cuda::softmax_signal_backward_planned<A>(nullptr, p, shape.plan);
  });
  cpu_table<A>().softmax_signal_backward(cpu_launch(), q);
  // The scale of the surprisal is a difference, too.
  expect_close("u", in_place ? logits : u, 16, signal.kind == SignalKind::kNll ? 0 : 0.1);
  expect_close("cotangent of the logits", u_bar, 8, 1);
}

// Calls body(shape, one of the first `signals`, first kind of row, variant); every combination of
// two comes up.
template <typename Body>
void for_shapes(int signals, const Body& body) {
  int next = 0;
  for (const Shape& shape : kShapes)
    for (int i = 0; i < (kThoroughly ? 11 : 1); ++i, ++next)
      body(shape, kSignals[next % 11 % signals], next % 7, next * 5);
}

template <typename S>
void signals() {
  for_shapes(6, [](const Shape& shape, const RowSignal& signal, int rows, int variant) {
    check_signal<S>(shape, signal, rows, variant % 32);
  });
}

template <typename A>
void signals_backward() {
  for_shapes(5, [](const Shape& shape, const RowSignal& signal, int rows, int variant) {
    check_signal_backward<A>(shape, signal, rows, variant % 32);
  });
}

// Vocabularies for which the kernel table splits rows by itself.
void large_vocabularies() {
  check_signal<float>({1, 33278, 0, 0, kPlanned}, {SignalKind::kSurprisal}, kOrdinary, 1 | 4 | 8);
  if (!kThoroughly) return;
  check_signal<__half>({3, 33278, 0, 0, kPlanned}, {SignalKind::kEntropy}, kOrdinary, 4);
  check_signal<double>({1, 300000, 0, 0, kPlanned}, {SignalKind::kNll}, kOrdinary, 4);
  check_signal_backward<float>({1, 300000, 0, 0, kPlanned}, {SignalKind::kEntropy}, kOrdinary, 0);
}

// A scratch buffer is an offer: without one a row has one block.
void without_scratch() {
  const Shape shape{1, 33278, 0, 0, kPlanned};
  const auto logits = make_logits<float>(shape, kOrdinary);
  const auto delta = unwritten<float>(1), delta_bar = random_values<float>(1, 1);
  const auto u_bar = random_values<float>(shape.vocab, 1), u = unwritten<float>(shape.vocab);
  SoftmaxSignal<float> p{};
  p.rows = 1, p.vocab = shape.vocab, p.signal = {SignalKind::kEntropy};
  p.logits = logits.cuda.data(), p.delta = delta.cuda.data();
  expect_launches(1, [&] { cuda_table<float>().softmax_signal({}, p); });
  p.logits = logits.cpu.data(), p.delta = delta.cpu.data();
  cpu_table<float>().softmax_signal(cpu_launch(), p);
  expect_close("delta", delta, 8, 1);
  SoftmaxSignalBackward<float> q{};
  q.rows = 1, q.vocab = shape.vocab, q.signal = {SignalKind::kNll};
  q.logits = logits.cuda.data(), q.delta_bar = delta_bar.cuda.data();
  q.u_bar = u_bar.cuda.data(), q.u = u.cuda.data();
  expect_launches(1, [&] { cuda_table<float>().softmax_signal_backward({}, q); });
  q.logits = logits.cpu.data(), q.delta_bar = delta_bar.cpu.data();
  q.u_bar = u_bar.cpu.data(), q.u = u.cpu.data();
  cpu_table<float>().softmax_signal_backward(cpu_launch(), q);
  expect_close("u", u, 16);
}

void targets_out_of_range() {
  for (const RowPlan& plan : {RowPlan{32, 1}, RowPlan{32, 2}}) {
    const Shape shape{1, 20, 0, 0, plan};
    const auto logits = make_logits<float>(shape, kOrdinary);
    const auto delta = unwritten<float>(1);
    const Array<char> scratch = make_scratch<float>(shape);
    const int64_t target = 20;
    SoftmaxSignal<float> p{};
    p.rows = 1, p.vocab = 20, p.signal = {SignalKind::kNll};
    p.logits = logits.cuda.data(), p.delta = delta.cuda.data();
    p.targets = &target, p.scratch = scratch.data();
    std::string message = "nothing";
    try {
      cuda::softmax_signal_planned<float>(nullptr, p, plan);
    } catch (const emu::Error& error) {
      message = error.what();
    }
    if (message.find("target out of range") == std::string::npos)
      throw std::runtime_error("target 20 of 20 raised " + message);
  }
}

// Where the kernel table splits rows, and where it does not.
void row_plans() {
  const auto blocks = [](int64_t rows, int64_t vocab) {
    return cuda::plan_rows(rows, vocab).blocks_per_row;
  };
  const struct {
    int64_t rows, vocab;
    int blocks;
  } kExpected[] = {{1, 10, 1},      {64, 10000, 1},  {1, 10000, 1},   {1, 300000, 18},
                   {16, 300000, 8}, {64, 300000, 2}, {65, 300000, 1}, {4, 33278, 2}};
  for (const auto& expected : kExpected)
    if (blocks(expected.rows, expected.vocab) != expected.blocks)
      throw std::runtime_error(std::to_string(blocks(expected.rows, expected.vocab)) +
                               " blocks per row for " + std::to_string(expected.rows) + " x " +
                               std::to_string(expected.vocab));
}

const Register kChecks[] = {
    {"softmax_signal_float", signals<float>},
    {"softmax_signal_double", signals<double>},
    {"softmax_signal_half", signals<__half>},
    {"softmax_signal_bfloat16", signals<__nv_bfloat16>},
    {"softmax_signal_backward_float", signals_backward<float>},
    {"softmax_signal_backward_double", signals_backward<double>},
    {"softmax_large_vocabularies", large_vocabularies},
    {"softmax_without_scratch", without_scratch},
    {"softmax_targets_out_of_range", targets_out_of_range},
    {"softmax_row_plans", row_plans},
};

}  // namespace
}  // namespace checks
