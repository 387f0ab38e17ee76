// Rows under masks and back: CUDA kernels against CPU kernels.
#include "masks.cuh"
#include "unit_shapes.h"

namespace checks {
namespace {

using namespace fused_recoder;

constexpr int64_t kSamples = 3;

// variant bits: 1 dropout, 2 one sample in place, 4 rows and samples that start elsewhere, 8 one
// mask for all rows
template <typename S>
void check_mask_rows(const Shape& shape, int variant) {
  using A = typename AccumulateIn<S>::type;
  context() = describe("mask_rows", sizeof(S), shape) + std::to_string(variant);
  const int64_t B = shape.rows, H = shape.hidden;
  const bool in_place = variant & 2, shared = variant & 8;
  const int64_t K = in_place ? 1 : kSamples;
  const auto in = random_values<S>(B * H, 1, shape.offset);
  const auto out = in_place ? absent<S>() : unwritten<S>(K * B * H, shape.offset);
  const Dropout dropout = variant & 1 ? kDropout : kNoDropout;
  const uint32_t sample = variant & 4 ? 5 : 0, row = variant & 4 ? 11 : 0;
  const MaskRows<S> p{
      K,      B,   H,      dropout,        kTime,
      sample, row, shared, in.cuda.data(), in_place ? in.cuda.data() : out.cuda.data()};
  const MaskRows<A> q{
      K,      B,   H,      dropout,       kTime,
      sample, row, shared, in.cpu.data(), in_place ? in.cpu.data() : out.cpu.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<S>().mask_rows(kStream, p);
    else
      cuda::launch_mask_rows(nullptr, p, shape.plan);
  });
  cpu_table<A>().mask_rows(cpu_launch(), q);
  expect_close("out", in_place ? in : out, 0);
}

// variant bits: 1 dropout, 2 rows that start elsewhere, 4 one mask for all rows
template <typename A>
void check_mask_sum(const Shape& shape, int variant) {
  context() = describe("mask_sum", sizeof(A), shape) + std::to_string(variant);
  const int64_t B = shape.rows, H = shape.hidden;
  const auto in = random_values<A>(kSamples * B * H, 1, shape.offset);
  const auto out = unwritten<A>(B * H, shape.offset);
  const Dropout dropout = variant & 1 ? kDropout : kNoDropout;
  const uint32_t row = variant & 2 ? 11 : 0;
  const bool shared = variant & 4;
  const MaskSum<A> p{kSamples, B, H, dropout, kTime, row, shared, in.cuda.data(), out.cuda.data()};
  expect_launches(1, [&] {
    if (shape.plan.threads == 0)
      cuda_table<A>().mask_sum(kStream, p);
    else
      cuda::launch_mask_sum(nullptr, p, shape.plan);
  });
  cpu_table<A>().mask_sum(
      cpu_launch(), {kSamples, B, H, dropout, kTime, row, shared, in.cpu.data(), out.cpu.data()});
  expect_close("out", out, 4, 2);
}

template <typename S>
void rows() {
  for_shapes(16, 4, 1, check_mask_rows<S>);
}

template <typename A>
void sums() {
  for_shapes(8, 3, 1, check_mask_sum<A>);
}

const Register kChecks[] = {
    {"mask_rows_float", rows<float>}, {"mask_rows_double", rows<double>},
    {"mask_rows_half", rows<__half>}, {"mask_rows_bfloat16", rows<__nv_bfloat16>},
    {"mask_sum_float", sums<float>},  {"mask_sum_double", sums<double>},
};

}  // namespace
}  // namespace checks
