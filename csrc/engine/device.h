// Which kernels run on which device. A device's backend is a plain struct that its own file
// registers: device.cpp the CPU's, device_cuda.cpp CUDA's. The engine asks by device and knows no
// more.
#pragma once

#include <c10/core/Device.h>

#include "../kernels/kernels.h"

namespace fused_recoder {

struct Backend {
  const Kernels<float>* f32;
  const Kernels<double>* f64;
  // Whether the host may read the device's memory at any time. Where it may not, it would have to
  // wait for the device: values are then checked by asserts on the device, and what could end early
  // goes on.
  bool host_reads;
  // Whether a launch takes microseconds whatever it does: then one that makes many things at once
  // is worth the memory that they take.
  bool launches_cost;
  void* (*current_stream)(int device) = nullptr;  // null: no streams
  void (*check_launches)() = nullptr;  // raises what a launch left behind; null: nothing to check
};

// The tests put CUDA's kernels in the CPU's place (tests/emu), hence the visibility.
__attribute__((visibility("default"))) void set_backend(c10::DeviceType type,
                                                        const Backend& backend);
__attribute__((visibility("default"))) const Backend& backend_of(c10::DeviceType type);

// The name of the CPU instruction set in use ("baseline", "avx2", "avx512", "avx512bf16").
const char* cpu_instruction_set();

template <typename S>
const Kernels<S>& kernels_for(const c10::Device& device);

Launch launch_on(const c10::Device& device);
bool host_reads(const c10::Device& device);
bool launches_cost(const c10::Device& device);
void check_launches(const c10::Device& device);

}  // namespace fused_recoder
