// Runs a launch: block after block, every CUDA thread of a block as a fiber, in an order that the
// test chooses. Knows what barriers and warp collectives demand and reports who breaks it.
#pragma once

#include <vector_types.h>  // dim3, uint3: the CUDA toolkit's own

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <vector>

namespace emu {

enum class Order { kForward, kReverse, kRandom };

struct Options {
  Order order = Order::kForward;  // of the threads between two barriers, and of the blocks
  unsigned seed = 1;              // of kRandom
};
extern Options options;

// A rule of CUDA was broken. The message says where every thread of the block is.
struct Error : std::runtime_error {
  using runtime_error::runtime_error;
};

// Launches since the start of the process, and bytes that vector loads and stores have moved.
extern long launches, bytes_moved;

// What the running CUDA thread sees as threadIdx, blockIdx, blockDim, gridDim.
extern uint3 thread_index, block_index;
extern dim3 block_shape, grid_shape;
extern void* dynamic_shared;

// A launch, as the runtime of CUDA gets it, and the kernel as g++ compiled it.
struct Call {
  struct Argument {
    const void* value;
    size_t bytes;
  };
  dim3 grid, block;
  size_t shared_bytes;
  const char* name;  // mangled: that of NameOf<kernel>*
  std::vector<Argument> arguments;
  std::function<void()> thread;
};

void launch(const Call& call);

// Who runs launches: fibers, unless a program replaces them (tests/ptx).
void run_on_fibers(const Call& call);
extern void (*launcher)(const Call&);

// Called by the running CUDA thread; `file` and `line` are those of the call in the kernel.
struct Place {
  const char* file;
  int line;
};

void sync_block(Place place);
unsigned lane();
void fence();
[[noreturn]] void assertion_failed(const char* condition, Place place);

enum class Collective { kSyncWarp, kShuffle, kBallot };

struct WarpCall {
  Collective kind;
  unsigned mask;
  const void* value;  // kShuffle: what this lane offers
  void* result;       // kShuffle: where the other lane's value goes
  unsigned bytes;     // kShuffle: of both
  int source;         // kShuffle: the lane to read
  bool vote;          // kBallot
  Place place;
};

// Returns the lanes that voted.
unsigned sync_warp(const WarpCall& call);

}  // namespace emu
