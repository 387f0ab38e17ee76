// Runs the CPU kernels of the baseline instruction set on fixed numbers and prints what they give,
// one array per line. tools/aarch64_check.py compares the lines of two architectures.
// T = 1 step; dimensions as in csrc/kernels/kernels.h, no multiples of a vector.
#include "../../csrc/kernels/kernels.h"

#include <cstdio>
#include <string>
#include <vector>

namespace fused_recoder::baseline {
extern const CpuKernels cpu_kernels;
}

namespace {
using namespace fused_recoder;

constexpr int64_t B = 5, H = 19, V = 131, K = 3;
const int64_t kSeed = 7;
const Dropout kNone = make_dropout(nullptr, 0, 0), kDropout = make_dropout(&kSeed, 1, 0.4);
const int64_t kTargets[B] = {3, 130, -100, 0, 64};
const uint8_t kSome[B] = {1, 1, 0, 1, 1};

void serially(int64_t count, int64_t, Launch::Body body, const void* context) {
  body(context, 0, count);
}
const Launch kLaunch = {serially, nullptr};

// The same on every machine, in [-scale, scale].
template <typename T>
std::vector<T> numbers(size_t n, double scale) {
  static uint64_t state = 1;
  std::vector<T> made(n);
  for (T& x : made) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = T(scale * (static_cast<double>(state >> 40) / (1 << 23) - 1));
  }
  return made;
}

template <typename T>
void show(const char* kernel, const std::vector<T>& values) {
  printf("%s%zu", kernel, sizeof(T));
  for (T x : values) printf(" %.17g", static_cast<double>(x));
  printf("\n");
}

template <typename T>
const Kernels<T>& table() {
  if constexpr (sizeof(T) == 4)
    return *baseline::cpu_kernels.f32;
  else
    return *baseline::cpu_kernels.f64;
}

template <typename T>
void cell() {
  auto gates = numbers<T>(B * 4 * H, 3), c_prev = numbers<T>(B * H, 2),
       h_prev = numbers<T>(B * H, 1);
  std::vector<T> c(B * H), h(B * H), h_up(B * H);
  table<T>().cell_forward(kLaunch, {.rows = B,
                                    .hidden = H,
                                    .gates = gates.data(),
                                    .c_prev = c_prev.data(),
                                    .h_prev = h_prev.data(),
                                    .live = kSome,
                                    .c = c.data(),
                                    .h = h.data(),
                                    .h_up = h_up.data(),
                                    .dropout = kDropout,
                                    .time = 4});
  show("cell_forward.gates", gates);
  show("cell_forward.c", c);
  show("cell_forward.h", h);
  show("cell_forward.h_up", h_up);

  auto dh = numbers<T>(B * H, 1), row_scale = numbers<T>(B, 1), alpha = numbers<T>(2 * B, 0.5);
  std::vector<T> h_new(B * H), c_new(B * H), up(B * H), after(B * H), dgates(B * 4 * H),
      grad_h(B * H), grad_c(B * H), norm_h(B), norm_c(B);
  table<T>().recode(kLaunch, {.rows = B,
                              .hidden = H,
                              .gates = gates.data(),
                              .c_prev = c_prev.data(),
                              .c = c.data(),
                              .h = h.data(),
                              .dh = dh.data(),
                              .dc = nullptr,
                              .row_scale = row_scale.data(),
                              .dropout = kDropout,
                              .time = 4,
                              .active = kSome,
                              .live = nullptr,
                              .alpha_h = {alpha.data(), 1},
                              .alpha_c = {alpha.data() + B, 1},
                              .h_recoded = h_new.data(),
                              .c_recoded = c_new.data(),
                              .h_up = up.data(),
                              .up_dropout = kNone,
                              .h_after = after.data(),
                              .dgates = dgates.data(),
                              .grad_h = grad_h.data(),
                              .grad_c = grad_c.data(),
                              .norm_h = norm_h.data(),
                              .norm_c = norm_c.data()});
  show("recode.h", h_new);
  show("recode.c", c_new);
  show("recode.h_after", after);
  show("recode.dgates", dgates);
  show("recode.grad_c", grad_c);
  show("recode.norm_h", norm_h);
  show("recode.norm_c", norm_c);

  auto dc = numbers<T>(B * H, 1), bar = numbers<T>(B * 4 * H, 1);
  std::vector<T> from_above(B * H), h_signal(B * H), below(B * 4 * H), gates_bar(B * 4 * H),
      c_bar(B * H), c_prev_bar(B * H), step_h(B), step_c(B), dh_prev(B * H);
  table<T>().recode_backward(kLaunch, {.rows = B,
                                       .hidden = H,
                                       .gates = gates.data(),
                                       .c_prev = c_prev.data(),
                                       .grad_h = grad_h.data(),
                                       .dh_recoded = dh.data(),
                                       .dh_up = up.data(),
                                       .dc_recoded = dc.data(),
                                       .alpha_h = alpha.data(),
                                       .alpha_c = alpha.data() + B,
                                       .dgates_bar = bar.data(),
                                       .dropout = kDropout,
                                       .up_dropout = kNone,
                                       .time = 4,
                                       .from_above_bar = from_above.data(),
                                       .h_signal = h_signal.data(),
                                       .dgates = below.data(),
                                       .gates_bar = gates_bar.data(),
                                       .c_bar = c_bar.data(),
                                       .c_prev_bar = c_prev_bar.data(),
                                       .step_bar_h = step_h.data(),
                                       .step_bar_c = step_c.data()});
  show("recode_backward.from_above_bar", from_above);
  show("recode_backward.gates_bar", gates_bar);
  show("recode_backward.c_bar", c_bar);
  show("recode_backward.c_prev_bar", c_prev_bar);
  show("recode_backward.step_bar_c", step_c);
  table<T>().cell_backward(kLaunch, {.rows = B,
                                     .hidden = H,
                                     .gates = gates.data(),
                                     .c_prev = c_prev.data(),
                                     .dh_up = up.data(),
                                     .dropout = kDropout,
                                     .time = 4,
                                     .dh_recoded = dh.data(),
                                     .dc = dc.data(),
                                     .dh_signal = nullptr,
                                     .signal_dropout = kNone,
                                     .gates_bar = gates_bar.data(),
                                     .c_bar = c_bar.data(),
                                     .c_prev_bar = c_prev_bar.data(),
                                     .live = kSome,
                                     .grad_h = grad_h.data(),
                                     .grad_c = grad_c.data(),
                                     .step_bar_h = step_h.data(),
                                     .step_bar_c = step_c.data(),
                                     .up_is_recoded = false,
                                     .dgates = dgates.data(),
                                     .dh_prev = dh_prev.data()});
  show("cell_backward.dgates", dgates);
  show("cell_backward.dc", dc);
  show("cell_backward.step_bar_h", step_h);
}

template <typename T>
void signal(SignalKind kind, const char* name, const int64_t* targets) {
  const std::string forward = std::string("softmax_signal.") + name;
  auto logits = numbers<T>(B * V, 6), given = logits;
  std::vector<T> direction(B * V), delta(B), scale(B), log_p(B), u(B * V);
  std::vector<int64_t> chosen(B);
  std::vector<double> scratch(64 * B + V);
  const auto& size = table<T>().softmax_scratch;
  if (size != nullptr) scratch.resize(size(B, V) / sizeof(double) + 1);
  table<T>().softmax_signal(kLaunch, {.rows = B,
                                      .vocab = V,
                                      .kind = kind,
                                      .logits = logits.data(),
                                      .targets = targets,
                                      .direction = direction.data(),
                                      .delta = delta.data(),
                                      .scale = scale.data(),
                                      .log_p = reads_target(kind) ? log_p.data() : nullptr,
                                      .chosen = reads_target(kind) ? chosen.data() : nullptr,
                                      .scratch = scratch.data()});
  show((forward + ".direction").c_str(), direction);
  show((forward + ".delta").c_str(), delta);
  show((forward + ".scale").c_str(), scale);
  show((forward + ".log_p").c_str(), log_p);
  auto u_bar = numbers<T>(B * V, 1), delta_bar = numbers<T>(B, 1);
  table<T>().softmax_signal_backward(kLaunch, {.rows = B,
                                               .vocab = V,
                                               .kind = kind,
                                               .logits = given.data(),
                                               .targets = targets,
                                               .delta_bar = delta_bar.data(),
                                               .loss_bar = nullptr,
                                               .u_bar = u_bar.data(),
                                               .u = u.data(),
                                               .scratch = scratch.data()});
  show(("softmax_signal_backward." + std::string(name)).c_str(), u_bar);
}

template <typename T>
void mixture() {
  auto logits = numbers<T>(K * B * V, 6);
  std::vector<T> direction(K * B * V), log_mean(B * V), delta(B);
  table<T>().mixture_signal(kLaunch, {.samples = K,
                                      .rows = B,
                                      .vocab = V,
                                      .logits = logits.data(),
                                      .direction = direction.data(),
                                      .log_mean = log_mean.data(),
                                      .delta = delta.data(),
                                      .common = nullptr,
                                      .common_stride = 0,
                                      .direction_sum = nullptr});
  show("mixture_signal.direction", direction);
  show("mixture_signal.delta", delta);
}

template <typename T>
void masks() {
  std::vector<T> mask(B * H), rows(K * B * H), sum(B * H);
  const auto in = numbers<T>(B * H, 1);
  table<T>().dropout_mask(
      kLaunch,
      {.rows = B, .units = H, .dropout = kDropout, .time = 2, .sample = 1, .out = mask.data()});
  table<T>().mask_rows(kLaunch, {.samples = K,
                                 .rows = B,
                                 .units = H,
                                 .dropout = kDropout,
                                 .time = 2,
                                 .first_sample = 0,
                                 .first_row = 0,
                                 .shared = false,
                                 .in = in.data(),
                                 .out = rows.data()});
  table<T>().mask_sum(kLaunch, {.samples = K,
                                .rows = B,
                                .units = H,
                                .dropout = kDropout,
                                .time = 2,
                                .first_row = 0,
                                .shared = false,
                                .in = rows.data(),
                                .out = sum.data()});
  show("dropout_mask", mask);
  show("mask_rows", rows);
  show("mask_sum", sum);
}

template <typename T>
void products() {
  const auto a = numbers<T>(B * H, 1), b = numbers<T>(V * H, 1), bias = numbers<T>(V, 1),
             left = numbers<T>(H * B, 1), right = numbers<T>(H * V, 1);
  std::vector<T> packed(table<T>().packed_size(H, V)), c(B * V);
  table<T>().pack(kLaunch, {.inner = H,
                            .cols = V,
                            .b = b.data(),
                            .stride_inner = 1,
                            .stride_cols = H,
                            .packed = packed.data()});
  table<T>().gemm(kLaunch, {.rows = B,
                            .inner = H,
                            .cols = V,
                            .a = a.data(),
                            .lda = H,
                            .packed = packed.data(),
                            .bias = bias.data(),
                            .accumulate = false,
                            .c = c.data(),
                            .ldc = V});
  show("gemm", c);
  std::vector<T> scratch(table<T>().outer_scratch(H, B, V));
  table<T>().outer_gemm(kLaunch, {.inner = H,
                                  .rows = B,
                                  .cols = V,
                                  .a = left.data(),
                                  .b = right.data(),
                                  .scratch = scratch.data(),
                                  .c = c.data()});
  show("outer_gemm", c);
  for (const int64_t rows : {int64_t(2), B}) {  // few stream through W, more go block by block
    std::vector<T> workspace(table<T>().stream_scratch(rows, H)), logits(rows * V), dh(rows * H),
        delta(rows), scale(rows);
    table<T>().stream_decode(kLaunch, {.rows = rows,
                                       .hidden = H,
                                       .vocab = V,
                                       .kind = SignalKind::kNll,
                                       .h = a.data(),
                                       .weight = b.data(),
                                       .bias = bias.data(),
                                       .targets = kTargets,
                                       .scratch = workspace.data(),
                                       .logits = logits.data(),
                                       .direction = nullptr,
                                       .dh = dh.data(),
                                       .delta = delta.data(),
                                       .scale = scale.data(),
                                       .log_p = nullptr,
                                       .chosen = nullptr});
    const std::string name = "stream_decode" + std::to_string(rows);
    show((name + ".dh").c_str(), dh);
    show((name + ".delta").c_str(), delta);
  }

  const int32_t units[K * H] = {0, 4, 18}, counts[K] = {3, 0, 0};
  std::vector<T> masked((K + 1) * B * H), logits(K * B * V);
  table<T>().shared_decode(
      kLaunch, {.samples = K,
                .rows = B,
                .hidden = H,
                .vocab = V,
                .lists = {.units = units, .counts = counts, .dropped = true, .scale = 1.5},
                .h = a.data(),
                .packed = packed.data(),
                .bias = bias.data(),
                .scratch = masked.data(),
                .logits = logits.data()});
  show("shared_decode", logits);
}

template <typename T>
void all() {
  cell<T>();
  signal<T>(SignalKind::kNll, "nll", kTargets);
  signal<T>(SignalKind::kSurprisal, "surprisal", kTargets);
  signal<T>(SignalKind::kEntropy, "entropy", nullptr);
  mixture<T>();
  masks<T>();
  products<T>();
}

}  // namespace

int main() {
  all<float>();
  all<double>();
}
