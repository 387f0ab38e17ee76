// What a kernel asks of the hardware, counted while it runs.
#pragma once

#include <map>

#include "memory.h"

namespace ptx {

// Accesses of whole warps. One of global memory moves sectors of 32 bytes; one of shared memory
// takes a round for each word that a bank of the 32 has to give besides its first.
struct Requests {
  uint64_t count = 0;
  uint64_t parts = 0;  // sectors, or rounds
  uint64_t least = 0;  // if the same bytes lay side by side
  uint64_t bytes = 0;  // different ones

  Requests& operator+=(const Requests& other);
};

struct Counts {
  uint64_t launches = 0, warps = 0;
  uint64_t instructions = 0, lanes = 0;  // of warps; lanes that took part in them
  uint64_t doubles = 0;                  // instructions that compute in double precision
  uint64_t branches = 0, parted = 0;     // parted: not all lanes went the same way
  Requests loads, stores, shared;
  std::map<const Instruction*, Requests> by_instruction;  // of global memory

  void add_global(const Instruction& at, const Access& access);
  void add_shared(const Access& access);
};

}  // namespace ptx
