// Dropout masks: the same bits on CUDA and on the CPU.
#include "checks.h"
#include "dropout_mask.cuh"

namespace checks {
namespace {

using namespace fused_recoder;

template <typename A>
void check_mask(int64_t rows, int64_t units, int offset, cuda::UnitPlan plan) {
  context() = "dropout_mask rows " + std::to_string(rows) + " units " + std::to_string(units);
  const Array<int64_t> seed = one(int64_t(-42));
  for (double p : {0.0001, 0.5, 0.999}) {
    const Dropout dropout = make_dropout(seed.data(), 4095, p);
    if (!kThoroughly && p != 0.5) continue;
    for (uint32_t sample : {0u, 9u}) {
      const auto out = unwritten<A>(rows * units, offset);
      const DropoutMask<A> on_cuda{rows, units, dropout, 77, sample, out.cuda.data()};
      if (plan.threads == 0)
        cuda_table<A>().dropout_mask({}, on_cuda);
      else
        cuda::launch_dropout_mask(nullptr, on_cuda, plan);
      cpu_table<A>().dropout_mask(cpu_launch(), {rows, units, dropout, 77, sample, out.cpu.data()});
      expect_equal("out", out);
    }
  }
}

template <typename A>
void masks() {
  if (at_thesis_shape()) return check_mask<A>(kThesisRows, kThesisHidden, 0, {0, 0});
  check_mask<A>(1, 1, 0, {0, 0});
  check_mask<A>(3, 7, 1, {0, 0});
  check_mask<A>(2, 650, 0, {0, 0});
  check_mask<A>(2, 37, 3, {3, 2});
  check_mask<A>(2, 8, 0, {33, 2});
}

// Launches have limits that the longest rows must not reach.
void unit_plans() {
  const cuda::UnitPlan few = cuda::plan_units(650, false), sums = cuda::plan_units(650, true),
                       many = cuda::plan_units(300000 * int64_t(650), false);
  if (few.threads != 64 || few.blocks_per_row != 3 || sums.threads != 192 ||
      sums.blocks_per_row != 1 || many.threads != 64 || many.blocks_per_row != 1024)
    throw std::runtime_error("plan_units has changed");
}

const Register kChecks[] = {
    {"unit_plans", unit_plans},
    {"dropout_mask_float", masks<float>},
    {"dropout_mask_double", masks<double>},
};

}  // namespace
}  // namespace checks
