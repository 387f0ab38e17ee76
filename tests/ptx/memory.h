// Memory that a kernel may touch, and what is refused: every byte outside of it, misaligned
// addresses, shared memory that nobody has written, accesses that nothing orders (history.h).
#pragma once

#include "history.h"
#include "kernel.h"

namespace ptx {

// One access of a warp: `bytes` at the address of each lane.
struct Access {
  uint64_t address[kLanes];
  uint32_t lanes;
  uint32_t bytes;
  Touch how;
};

// What one lane does.
struct LaneAccess {
  uint64_t address;
  uint32_t bytes;
  Touch how;
  Who thread;
};

class Stretch {
 public:
  Stretch(uint64_t begin, size_t bytes, size_t granule, char* data)
      : begin(begin), bytes(bytes), granule_(granule), data_(data) {}

  bool holds(const LaneAccess& access) const {
    return access.address >= begin && access.address - begin <= bytes &&
           bytes - (access.address - begin) >= access.bytes;
  }
  // Refuses what conflicts with an earlier access of another thread.
  char* touch(History& history, const LaneAccess& access);

  uint64_t begin, bytes;

 private:
  size_t granule_;  // bytes of an element
  char* data_;
  std::vector<Traces> traces_;  // by element; empty until the first access
};

// What emu::device_memory() lists.
class GlobalMemory {
 public:
  GlobalMemory();
  char* touch(History& history, const LaneAccess& access);

 private:
  Stretch& find(const LaneAccess& access);
  std::vector<Stretch> stretches_;  // by address
  size_t last_ = 0;                 // that was looked for
};

// Of a block; addresses start at 0.
class SharedMemory {
 public:
  SharedMemory(const Kernel& kernel, size_t dynamic_bytes);
  char* touch(History& history, const LaneAccess& access);
  bool written(const LaneAccess& access) const;
  // An asynchronous copy is under way: until it is delivered, nobody may touch its destination.
  void expect(History& history, const LaneAccess& access);
  char* deliver(History& history, const LaneAccess& access);

 private:
  enum State : char { kHole, kUnwritten, kWritten, kUnderWay };
  bool holds(const LaneAccess& access, State state) const;
  void check(const LaneAccess& access) const;
  std::vector<State> states_;  // by byte
  std::vector<char> data_;
  Stretch stretch_;
};

}  // namespace ptx
