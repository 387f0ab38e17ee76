// test_detectors NAME: runs one kernel of bugs.cuh or patterns.cuh in forward, reverse and random
// order and prints what was found: an error of the shim, NaNs, results that depend on the order,
// or nothing. Sanitizers speak for themselves. test_detectors --list prints the names.
#include <cstdio>
#include <cstring>
#include <vector>

#include "bugs.cuh"
#include "device_memory.h"
#include "patterns.cuh"

namespace {

struct Case {
  const char* name;
  void (*launch)(const float* in, float* out);
};

#define NAMED_CASE(name, blocks, ...)                                              \
  {name, [](const float* in, float* out) {                                         \
     CUDA_LAUNCH(blocks, 256, 256 * sizeof(float), nullptr, __VA_ARGS__)(in, out); \
   }}
#define CASE(kernel, blocks) NAMED_CASE(#kernel, blocks, kernel)
const Case kCases[] = {
    CASE(missing_barrier, 1),
    CASE(missing_barrier_at_loop_end, 1),
    CASE(missing_syncwarp, 1),
    CASE(shuffle_taken_for_a_fence, 1),
    CASE(barrier_in_a_branch, 1),
    CASE(two_barriers_in_branches, 1),
    CASE(exit_before_a_barrier, 1),
    CASE(mask_names_absent_lanes, 1),
    CASE(mask_names_exited_lanes, 1),
    CASE(mask_without_the_caller, 1),
    CASE(shuffle_from_outside_the_mask, 1),
    CASE(beyond_global_memory, 1),
    CASE(beyond_dynamic_shared_memory, 1),
    CASE(beyond_static_shared_memory, 1),
    CASE(uninitialised_static_shared_memory, 1),
    CASE(uninitialised_dynamic_shared_memory, 1),
    CASE(misaligned_vector_load, 1),
    CASE(blocks_share_a_counter, 2),
    CASE(block_reads_another_block, 2),
    CASE(failing_assert, 1),
    NAMED_CASE("last_block_without_fence", 6, last_block_sums<false>),
    CASE(reduction_in_a_loop, 1),
    CASE(neighbours_with_syncwarp, 2),
    CASE(half_warps_with_exact_masks, 2),
    CASE(compaction_by_ballot, 2),
    CASE(atomics_between_blocks, 3),
    CASE(reversal_in_dynamic_shared_memory, 2),
    NAMED_CASE("last_block_with_fence", 6, last_block_sums<true>),
};

std::vector<float> run(const Case& which, emu::Order order) {
  emu::options.order = order;
  std::vector<float> in(1024), out(1024, 0.0f);
  for (int i = 0; i < 1024; ++i) in[i] = float(i % 97) + 1;
  const emu::DeviceMemory of_in(in.data(), in.size()), of_out(out.data(), out.size());
  which.launch(in.data(), out.data());
  return out;
}

const char* examine(const Case& which) {
  const std::vector<float> first = run(which, emu::Order::kForward);
  for (float value : first)
    if (std::isnan(value)) return "NaN in the result";
  for (emu::Order order : {emu::Order::kReverse, emu::Order::kRandom})
    if (run(which, order) != first) return "the result depends on the order";
  return "nothing found";
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  for (const Case& which : kCases) {
    if (strcmp(arguments[1], "--list") == 0) puts(which.name);
    if (strcmp(arguments[1], which.name) != 0) continue;
    try {
      const char* finding = examine(which);
      puts(finding);
      return strcmp(finding, "nothing found") != 0;
    } catch (const emu::Error& error) {
      puts(error.what());
      return 1;
    }
  }
  return strcmp(arguments[1], "--list") != 0;
}
