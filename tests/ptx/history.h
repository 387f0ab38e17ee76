// Who touched an element last, and whether what synchronises threads lies between: two accesses of
// which one writes must be ordered by a barrier, a __syncwarp, or, between blocks, by fences on
// both sides. Found whatever order the threads happen to run in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ptx {

constexpr uint32_t kThreadsOfBlock = 2048;  // numbers of a block: threads, then its groups

// A thread, or the smallest group that holds several: number % 2048 is a thread (below 1024), a
// warp (1024 + warp) or the block (2047).
using Who = uint32_t;
constexpr Who kNobody = ~0u, kSeveralBlocks = ~0u - 1;
Who thread_of(uint32_t block, uint32_t thread);
std::string describe(Who who);

struct Visit {
  Who who = kNobody;
  uint32_t when = 0;
};

enum class Touch { kRead, kWrite, kAtomic };

// Of one element.
struct Traces {
  Visit read, write, atomic;
};

// The launch's clock ticks whenever threads synchronise.
class History {
 public:
  explicit History(uint32_t blocks) : fences_(blocks) {}

  void start_block(uint32_t block);
  void barrier() { barrier_ = ++now_; }
  void sync_warp(Who warp, uint32_t mask);  // warp: its first thread
  void fence() { fences_[block_] = ++now_; }

  // The thread whose earlier access conflicts, or kNobody. Takes the access down.
  Who touch(Traces& traces, Who thread, Touch how);

 private:
  bool ordered(const Visit& earlier, Who thread) const;
  void add(Visit& visits, Who thread) const;

  uint32_t now_ = 1, block_ = 0, barrier_ = 0;
  std::vector<uint32_t> fences_;  // by block: the last one
  struct WarpSync {
    uint32_t when, mask;
  };
  std::vector<WarpSync> warp_syncs_;  // by thread of the running block: the last one
};

}  // namespace ptx
