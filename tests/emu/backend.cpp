// CUDA's kernels, run by the shim, in the place of the CPU's: the whole extension then works on CPU
// tensors as it would on a GPU. Loaded into a process that has imported fused_recoder.
#include "../../csrc/engine/device.h"
#include "scheduler.h"
#include "tables.h"

using namespace fused_recoder;

namespace {

const Backend& cpu() {
  static const Backend kept = backend_of(c10::kCPU);
  return kept;
}

long asked = 0;  // launches when somebody last asked for errors

void check_launches() { asked = emu::launches; }

}  // namespace

// `host_reads`: whether the engine may look at values, which it may not on a GPU.
extern "C" void emu_install(bool host_reads) {
  cpu();
  asked = emu::launches;
  set_backend(c10::kCPU, {cuda_kernels.f32, cuda_kernels.f64, host_reads, nullptr, check_launches});
}

extern "C" void emu_uninstall() { set_backend(c10::kCPU, cpu()); }

extern "C" long emu_launches() { return emu::launches; }
// Launches whose errors nobody has asked for yet.
extern "C" long emu_unchecked() { return emu::launches - asked; }
extern "C" long emu_bytes_moved() { return emu::bytes_moved; }

// 0 forward, 1 reverse, 2 random
extern "C" void emu_set_order(int order) { emu::options.order = static_cast<emu::Order>(order); }
