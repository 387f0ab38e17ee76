// The LSTM cell: CUDA kernels against CPU kernels.
#include "cell.cuh"
#include "recode_backward.cuh"
#include "unit_shapes.h"

namespace checks {
namespace {

using namespace fused_recoder;

// variant bits: 1 live mask, 2 h_up, 4 dropout
template <typename S>
void check_forward(const Shape& shape, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("cell_forward", sizeof(S), shape) + std::to_string(variant);
  const int64_t B = shape.rows, H = shape.hidden;
  const int offset = shape.offset;
  const auto gates = random_values<A>(B * 4 * H, 4, offset);
  const auto c_prev = random_values<A>(B * H, 2, offset);
  const auto h_prev = random_values<S>(B * H, 1, offset);
  const auto live = variant & 1 ? some_rows(B, variant / 2) : absent<uint8_t>();
  const auto c = unwritten<A>(B * H, offset);
  const auto h = unwritten<S>(B * H, offset);
  const auto h_up = variant & 2 ? unwritten<S>(B * H, offset) : absent<S>();
  const Dropout dropout = variant & 4 ? kDropout : kNoDropout;
  const CellForward<S> p{B,
                         H,
                         gates.cuda.data(),
                         c_prev.cuda.data(),
                         h_prev.cuda.data(),
                         live.cuda.data(),
                         c.cuda.data(),
                         h.cuda.data(),
                         h_up.cuda.data(),
                         dropout,
                         kTime};
  const CellForward<A> q{B,
                         H,
                         gates.cpu.data(),
                         c_prev.cpu.data(),
                         h_prev.cpu.data(),
                         live.cpu.data(),
                         c.cpu.data(),
                         h.cpu.data(),
                         h_up.cpu.data(),
                         dropout,
                         kTime};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().cell_forward(kStream, p);
    else
      cuda::launch_cell_forward(nullptr, p, shape.plan);
  });
  cpu_table<A>().cell_forward(cpu_launch(), q);
  expect_close("gates", gates, 8);
  expect_close("c", c, 8);
  expect_close("h", h, 8);
  expect_close("h_up", h_up, 8);
}

// variant bits: 1 live mask, 2 active mask, 4 recodes h, 8 recodes c, 16 dropout, 32 all optional
// results and one step size per row, 64 the gradient in c is given, 128 there is none in h
template <typename S>
void check_recode(const Shape& shape, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("recode", sizeof(S), shape) + std::to_string(variant);
  const int64_t B = shape.rows, H = shape.hidden;
  const int offset = shape.offset;
  const bool recodes_h = variant & 4, recodes_c = variant & 8, all = variant & 32;
  const auto gates = random_values<A>(B * 4 * H, 1, offset);
  const auto c_prev = random_values<A>(B * H, 2, offset);
  const auto c = random_values<A>(B * H, 2, offset);
  const auto h = random_values<S>(B * H, 1, offset);
  auto dh = variant & 128 ? absent<A>() : random_values<A>(B * H, 1, offset);
  auto dc = variant & 64 ? random_values<A>(B * H, 1, offset) : absent<A>();
  const auto row_scale = all ? random_values<A>(B, 2) : absent<A>();
  const auto live = variant & 1 ? some_rows(B, 0) : absent<uint8_t>();
  const auto active = variant & 2 ? some_rows(B, 1) : absent<uint8_t>();
  if (variant & 2) {  // rows that do not count may hold anything
    if (!(variant & 128)) dh.set(0, INFINITY);
    if (variant & 64) dc.set(0, NAN);
  }
  const auto alpha_h = recodes_h ? random_values<A>(B, 1) : absent<A>();
  const auto alpha_c = recodes_c ? random_values<A>(B, 1) : absent<A>();
  const auto h_recoded = unwritten<S>(B * H, offset);
  const auto c_recoded = unwritten<A>(B * H, offset);
  const auto optional = [&](auto make) { return all ? make() : decltype(make()){}; };
  const auto h_up = optional([&] { return unwritten<S>(B * H, offset); });
  const auto h_after = optional([&] { return unwritten<S>(B * H, offset); });
  const auto dgates = optional([&] { return unwritten<S>(B * 4 * H, offset); });
  const auto grad_h = optional([&] { return unwritten<A>(B * H, offset); });
  const auto grad_c = optional([&] { return unwritten<A>(B * H, offset); });
  const bool sums = all && shape.plan.blocks_per_row <= 1;
  const auto norm_h = sums ? unwritten<A>(B) : absent<A>();
  const auto norm_c = sums ? unwritten<A>(B) : absent<A>();
  const Dropout dropout = variant & 16 ? kDropout : kNoDropout;
  const Dropout up_dropout = variant & 16 ? kOtherDropout : kNoDropout;
  const int64_t stride = all ? 1 : 0;
  const Recode<S> p{B,
                    H,
                    gates.cuda.data(),
                    c_prev.cuda.data(),
                    c.cuda.data(),
                    h.cuda.data(),
                    dh.cuda.data(),
                    dc.cuda.data(),
                    row_scale.cuda.data(),
                    dropout,
                    kTime,
                    active.cuda.data(),
                    live.cuda.data(),
                    {alpha_h.cuda.data(), stride},
                    {alpha_c.cuda.data(), stride},
                    h_recoded.cuda.data(),
                    c_recoded.cuda.data(),
                    h_up.cuda.data(),
                    up_dropout,
                    h_after.cuda.data(),
                    dgates.cuda.data(),
                    grad_h.cuda.data(),
                    grad_c.cuda.data(),
                    norm_h.cuda.data(),
                    norm_c.cuda.data()};
  const Recode<A> q{B,
                    H,
                    gates.cpu.data(),
                    c_prev.cpu.data(),
                    c.cpu.data(),
                    h.cpu.data(),
                    dh.cpu.data(),
                    dc.cpu.data(),
                    row_scale.cpu.data(),
                    dropout,
                    kTime,
                    active.cpu.data(),
                    live.cpu.data(),
                    {alpha_h.cpu.data(), stride},
                    {alpha_c.cpu.data(), stride},
                    h_recoded.cpu.data(),
                    c_recoded.cpu.data(),
                    h_up.cpu.data(),
                    up_dropout,
                    h_after.cpu.data(),
                    dgates.cpu.data(),
                    grad_h.cpu.data(),
                    grad_c.cpu.data(),
                    norm_h.cpu.data(),
                    norm_c.cpu.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().recode(kStream, p);
    else
      cuda::launch_recode(nullptr, p, shape.plan);
  });
  cpu_table<A>().recode(cpu_launch(), q);
  expect_close("h_recoded", h_recoded, 8);
  expect_close("c_recoded", c_recoded, 8);
  expect_close("h_up", h_up, 8);
  expect_close("h_after", h_after, 8);
  expect_close("dgates", dgates, 8);
  expect_close("grad_h", grad_h, 8);
  expect_close("grad_c", grad_c, 8);
  expect_close("norm_h", norm_h, 16);
  expect_close("norm_c", norm_c, 16);
}

// variant bits: 1 live mask, 2 gradient from above, 4 gradient of h', 8 gradients of step sizes,
// 16 dropout, 32 what went up is recoded, 64 more cotangents, of the recoding gradient
template <typename S>
void check_backward(const Shape& shape, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("cell_backward", sizeof(S), shape) + std::to_string(variant);
  const int64_t B = shape.rows, H = shape.hidden;
  const int offset = shape.offset;
  const bool steps = variant & 8 && shape.plan.blocks_per_row <= 1;
  const auto gates = random_values<A>(B * 4 * H, 1, offset);
  const auto c_prev = random_values<A>(B * H, 2, offset);
  const auto dh_up = variant & 2 ? random_values<A>(B * H, 1, offset) : absent<A>();
  const auto dh_recoded = variant & 4 ? random_values<A>(B * H, 1, offset) : absent<A>();
  const auto dc = random_values<A>(B * H, 1, offset);
  const auto live = variant & 1 ? some_rows(B, variant / 2) : absent<uint8_t>();
  const auto grad_h = steps ? random_values<A>(B * H, 1, offset) : absent<A>();
  const auto grad_c = steps ? random_values<A>(B * H, 1, offset) : absent<A>();
  const auto step_bar_h = steps ? unwritten<A>(B) : absent<A>();
  const auto step_bar_c = steps ? unwritten<A>(B) : absent<A>();
  const auto more = [&](int64_t n) {
    return variant & 64 ? random_values<A>(n, 1, offset) : absent<A>();
  };
  const auto dh_signal = more(B * H), gates_bar = more(B * 4 * H), c_bar = more(B * H);
  const auto c_prev_bar = more(B * H);
  const auto dgates = unwritten<S>(B * 4 * H, offset);
  const auto dh_prev = variant & 1 ? unwritten<A>(B * H, offset) : absent<A>();
  const Dropout dropout = variant & 16 ? kDropout : kNoDropout;
  const Dropout signal_dropout = variant & 16 ? kOtherDropout : kNoDropout;
  const bool up_is_recoded = variant & 32;
  const CellBackward<S> p{B,
                          H,
                          gates.cuda.data(),
                          c_prev.cuda.data(),
                          dh_up.cuda.data(),
                          dropout,
                          kTime,
                          dh_recoded.cuda.data(),
                          dc.cuda.data(),
                          dh_signal.cuda.data(),
                          signal_dropout,
                          gates_bar.cuda.data(),
                          c_bar.cuda.data(),
                          c_prev_bar.cuda.data(),
                          live.cuda.data(),
                          grad_h.cuda.data(),
                          grad_c.cuda.data(),
                          step_bar_h.cuda.data(),
                          step_bar_c.cuda.data(),
                          up_is_recoded,
                          dgates.cuda.data(),
                          dh_prev.cuda.data()};
  const CellBackward<A> q{B,
                          H,
                          gates.cpu.data(),
                          c_prev.cpu.data(),
                          dh_up.cpu.data(),
                          dropout,
                          kTime,
                          dh_recoded.cpu.data(),
                          dc.cpu.data(),
                          dh_signal.cpu.data(),
                          signal_dropout,
                          gates_bar.cpu.data(),
                          c_bar.cpu.data(),
                          c_prev_bar.cpu.data(),
                          live.cpu.data(),
                          grad_h.cpu.data(),
                          grad_c.cpu.data(),
                          step_bar_h.cpu.data(),
                          step_bar_c.cpu.data(),
                          up_is_recoded,
                          dgates.cpu.data(),
                          dh_prev.cpu.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().cell_backward(kStream, p);
    else
      cuda::launch_cell_backward(nullptr, p, shape.plan);
  });
  cpu_table<A>().cell_backward(cpu_launch(), q);
  expect_close("dgates", dgates, 8);
  expect_close("dc", dc, 8);
  expect_close("dh_prev", dh_prev, 0);
  expect_close("step_bar_h", step_bar_h, 1, H);
  expect_close("step_bar_c", step_bar_c, 1, H);
}

// variant bits: 1 recodes h, 2 recodes c, 4 something went below, 8 dropout, 16 what went up is
// recoded, 32 gradients of step sizes
template <typename S>
void check_recode_backward(const Shape& shape, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("recode_backward", sizeof(S), shape) + std::to_string(variant);
  const int64_t B = shape.rows, H = shape.hidden;
  const int offset = shape.offset;
  const bool below = variant & 4, steps = variant & 32 && shape.plan.blocks_per_row <= 1;
  const auto gates = random_values<A>(B * 4 * H, 1, offset);
  const auto c_prev = random_values<A>(B * H, 2, offset);
  const auto grad_h = random_values<A>(B * H, 1, offset);
  const auto dh_recoded = random_values<A>(B * H, 1, offset);
  const auto dh_up = variant & 16 ? random_values<A>(B * H, 1, offset) : absent<A>();
  const auto dc_recoded = random_values<A>(B * H, 1, offset);
  const auto alpha_h = variant & 1 ? random_values<A>(B, 1) : absent<A>();
  const auto alpha_c = variant & 2 ? random_values<A>(B, 1) : absent<A>();
  const auto dgates_bar = below ? random_values<A>(B * 4 * H, 1, offset) : absent<A>();
  const Dropout dropout = variant & 8 ? kDropout : kNoDropout;
  const Dropout up_dropout = variant & 8 ? kOtherDropout : kNoDropout;
  const auto from_above_bar = unwritten<S>(B * H, offset);
  const auto h_signal = variant & 16 ? unwritten<S>(B * H, offset) : absent<S>();
  const auto dgates = below ? unwritten<S>(B * 4 * H, offset) : absent<S>();
  const auto gates_bar = unwritten<A>(B * 4 * H, offset);
  const auto c_bar = unwritten<A>(B * H, offset), c_prev_bar = unwritten<A>(B * H, offset);
  const auto step_bar_h = steps ? unwritten<A>(B) : absent<A>();
  const auto step_bar_c = steps ? unwritten<A>(B) : absent<A>();
  const RecodeBackward<S> p{B,
                            H,
                            gates.cuda.data(),
                            c_prev.cuda.data(),
                            grad_h.cuda.data(),
                            dh_recoded.cuda.data(),
                            dh_up.cuda.data(),
                            dc_recoded.cuda.data(),
                            alpha_h.cuda.data(),
                            alpha_c.cuda.data(),
                            dgates_bar.cuda.data(),
                            dropout,
                            up_dropout,
                            kTime,
                            from_above_bar.cuda.data(),
                            h_signal.cuda.data(),
                            dgates.cuda.data(),
                            gates_bar.cuda.data(),
                            c_bar.cuda.data(),
                            c_prev_bar.cuda.data(),
                            step_bar_h.cuda.data(),
                            step_bar_c.cuda.data()};
  const RecodeBackward<A> q{B,
                            H,
                            gates.cpu.data(),
                            c_prev.cpu.data(),
                            grad_h.cpu.data(),
                            dh_recoded.cpu.data(),
                            dh_up.cpu.data(),
                            dc_recoded.cpu.data(),
                            alpha_h.cpu.data(),
                            alpha_c.cpu.data(),
                            dgates_bar.cpu.data(),
                            dropout,
                            up_dropout,
                            kTime,
                            from_above_bar.cpu.data(),
                            h_signal.cpu.data(),
                            dgates.cpu.data(),
                            gates_bar.cpu.data(),
                            c_bar.cpu.data(),
                            c_prev_bar.cpu.data(),
                            step_bar_h.cpu.data(),
                            step_bar_c.cpu.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().recode_backward(kStream, p);
    else
      cuda::launch_recode_backward(nullptr, p, shape.plan);
  });
  cpu_table<A>().recode_backward(cpu_launch(), q);
  expect_close("from_above_bar", from_above_bar, 16);
  expect_close("h_signal", h_signal, 8);
  expect_close("dgates", dgates, 8);
  expect_close("gates_bar", gates_bar, 16, 1);
  expect_close("c_bar", c_bar, 16, 1);
  expect_close("c_prev_bar", c_prev_bar, 8);
  expect_close("step_bar_h", step_bar_h, 1, H);
  expect_close("step_bar_c", step_bar_c, 1, H);
}

template <typename S>
void recode_backward() {
  for_shapes(64, 6, 63, check_recode_backward<S>);
}

template <typename S>
void forward() {
  for_shapes(8, 3, 6, check_forward<S>);
}

template <typename S>
void recode() {
  for_shapes(256, 24, 4 | 8 | 16 | 32, check_recode<S>);
}

template <typename S>
void backward() {
  for_shapes(128, 12, 2 | 4 | 8 | 16 | 64, check_backward<S>);
}

const Register kChecks[] = {
    {"cell_forward_float", forward<float>},
    {"cell_forward_double", forward<double>},
    {"cell_forward_half", forward<__half>},
    {"cell_forward_bfloat16", forward<__nv_bfloat16>},
    {"recode_float", recode<float>},
    {"recode_double", recode<double>},
    {"recode_half", recode<__half>},
    {"recode_bfloat16", recode<__nv_bfloat16>},
    {"cell_backward_float", backward<float>},
    {"cell_backward_double", backward<double>},
    {"cell_backward_half", backward<__half>},
    {"cell_backward_bfloat16", backward<__nv_bfloat16>},
    {"recode_backward_float", recode_backward<float>},
    {"recode_backward_double", recode_backward<double>},
    {"recode_backward_half", recode_backward<__half>},
    {"recode_backward_bfloat16", recode_backward<__nv_bfloat16>},
};

}  // namespace
}  // namespace checks
