// kernels [--thesis-shape] NAME: runs one check in forward, reverse and random order of threads.
// kernels --list prints the names.
#include <cstring>

#include "checks.h"

namespace fused_recoder {
namespace baseline {
extern const CpuKernels cpu_kernels;
}
}  // namespace fused_recoder

namespace checks {

std::vector<Check>& all_checks() {
  static std::vector<Check> list;
  return list;
}

bool& at_thesis_shape() {
  static bool value;
  return value;
}

uint64_t& digest() {
  static uint64_t value;
  return value;
}

std::string& context() {
  static std::string text;
  return text;
}

std::mt19937& random_bits() {
  static std::mt19937 generator;
  return generator;
}

template <>
const fused_recoder::Kernels<float>& cuda_table<float>() {
  return *fused_recoder::cuda_kernels.f32;
}
template <>
const fused_recoder::Kernels<double>& cuda_table<double>() {
  return *fused_recoder::cuda_kernels.f64;
}
template <>
const fused_recoder::Kernels<__half>& cuda_table<__half>() {
  return *fused_recoder::cuda_kernels.f16;
}
template <>
const fused_recoder::Kernels<__nv_bfloat16>& cuda_table<__nv_bfloat16>() {
  return *fused_recoder::cuda_kernels.bf16;
}
template <>
const fused_recoder::Kernels<float>& cpu_table<float>() {
  return *fused_recoder::baseline::cpu_kernels.f32;
}
template <>
const fused_recoder::Kernels<double>& cpu_table<double>() {
  return *fused_recoder::baseline::cpu_kernels.f64;
}

fused_recoder::Launch cpu_launch() {
  return {[](int64_t count, int64_t, fused_recoder::Launch::Body body, const void* context) {
            body(context, 0, count);
          },
          nullptr};
}

namespace {

uint64_t run_in(emu::Order order, const Check& check) {
  emu::options.order = order;
  random_bits().seed(1);
  digest() = 0;
  check.run();
  return digest();
}

int run(const Check& check) {
  try {
    const uint64_t forward = run_in(emu::Order::kForward, check);
    const uint64_t reverse = run_in(emu::Order::kReverse, check);
    const uint64_t random = run_in(emu::Order::kRandom, check);
    if (forward == reverse && forward == random) return 0;
    printf("%s: the result depends on the order of threads\n", check.name);
  } catch (const std::exception& error) {
    printf("%s: %s\n", check.name, error.what());
  }
  return 1;
}

}  // namespace
}  // namespace checks

int main(int count, char** arguments) {
  if (count == 3 && strcmp(arguments[1], "--thesis-shape") == 0) {
    checks::at_thesis_shape() = true;
    ++arguments;
  } else if (count != 2) {
    return 2;
  }
  for (const checks::Check& check : checks::all_checks()) {
    if (strcmp(arguments[1], "--list") == 0) puts(check.name);
    if (strcmp(arguments[1], check.name) == 0) return checks::run(check);
  }
  return strcmp(arguments[1], "--list") != 0;
}
