#include "device.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace fused_recoder {

namespace baseline {
extern const CpuKernels cpu_kernels;
}
#ifdef FR_X86
namespace avx2 {
extern const CpuKernels cpu_kernels;
}
namespace avx512 {
extern const CpuKernels cpu_kernels;
}
namespace avx512bf16 {
extern const CpuKernels cpu_kernels;
}
#endif

namespace {

struct InstructionSet {
  const CpuKernels& kernels;
  bool usable;  // on this machine
};

// From the best on.
std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
#ifdef FR_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const bool has_bfloat16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  sets.push_back({avx512bf16::cpu_kernels, has_bfloat16});
  sets.push_back({avx512::cpu_kernels, has_avx512});
  sets.push_back({avx2::cpu_kernels, has_avx2});
#endif
  sets.push_back({baseline::cpu_kernels, true});
  return sets;
}

// The best instruction set of this machine; FUSED_RECODER_ISA asks for a lesser one.
const CpuKernels& pick_cpu_kernels() {
  const char* variable = std::getenv("FUSED_RECODER_ISA");
  const std::string wanted = variable != nullptr ? variable : "";
  std::string names;
  for (const InstructionSet& set : instruction_sets()) {
    const std::string name = set.kernels.name;
    TORCH_CHECK_VALUE(wanted != name || set.usable, "FUSED_RECODER_ISA=", name,
                      ", but this CPU does not have it");
    if (set.usable && (wanted.empty() || wanted == name)) return set.kernels;
    names += (names.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK_VALUE(false, "FUSED_RECODER_ISA must be one of ", names, "; got '", wanted, "'");
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& picked = pick_cpu_kernels();
  return picked;
}

void parallel_for(int64_t count, int64_t grain, Launch::Body body, const void* context) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

constexpr int kDeviceTypes = static_cast<int>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

Backend& entry(c10::DeviceType type) {
  static Backend backends[kDeviceTypes] = {};
  Backend& backend = backends[static_cast<int>(type)];
  if (type == c10::kCPU && backend.f32 == nullptr)
    backend = {.f32 = cpu_kernels().f32,
               .f64 = cpu_kernels().f64,
               .host_reads = true,
               .launches_cost = false};
  return backend;
}

}  // namespace

void set_backend(c10::DeviceType type, const Backend& backend) { entry(type) = backend; }

const Backend& backend_of(c10::DeviceType type) {
  const Backend& backend = entry(type);
  TORCH_CHECK(backend.f32 != nullptr, "fused_recoder has no kernels for device ", type);
  return backend;
}

const char* cpu_instruction_set() { return cpu_kernels().name; }

template <>
const Kernels<float>& kernels_for<float>(const c10::Device& device) {
  return *backend_of(device.type()).f32;
}

template <>
const Kernels<double>& kernels_for<double>(const c10::Device& device) {
  return *backend_of(device.type()).f64;
}

Launch launch_on(const c10::Device& device) {
  const Backend& backend = backend_of(device.type());
  void* stream = backend.current_stream ? backend.current_stream(device.index()) : nullptr;
  return Launch{parallel_for, stream};
}

bool host_reads(const c10::Device& device) { return backend_of(device.type()).host_reads; }

bool launches_cost(const c10::Device& device) { return backend_of(device.type()).launches_cost; }

void check_launches(const c10::Device& device) {
  const Backend& backend = backend_of(device.type());
  if (backend.check_launches != nullptr) backend.check_launches();
}

}  // namespace fused_recoder
