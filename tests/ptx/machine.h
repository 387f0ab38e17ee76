// A launch and the block that runs. Blocks run one after the other, and so do the warps of a block
// between two barriers, in an order that the test chooses.
#pragma once

#include <vector_types.h>  // dim3, uint3

#include <memory>

#include "../emu/scheduler.h"
#include "counts.h"
#include "memory.h"
#include "warp.h"

namespace ptx {

class File;

struct Launch {
  const File& file;
  const Kernel& kernel;
  dim3 grid, shape;  // shape: of a block
  size_t dynamic_shared_bytes;
  std::vector<char> parameters;  // as the kernel reads them
  Counts& counts;
  History history;
  GlobalMemory memory;

  uint32_t threads() const { return shape.x * shape.y * shape.z; }
  void run();
};

struct Block {
  Launch& launch;
  uint3 index;
  uint32_t number;
  SharedMemory shared;
  std::vector<std::unique_ptr<Warp>> warps;

  Block(Launch& launch, uint32_t number, std::vector<char>& registers);
  void run();

 private:
  void release_barrier();
  void refuse_early_exits() const;
};

}  // namespace ptx
