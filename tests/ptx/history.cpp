#include "history.h"

namespace ptx {
namespace {

constexpr uint32_t kWarps = 1024, kBlock = 2047;  // where numbers of groups start; see Who

uint32_t block_of(Who who) { return who / kThreadsOfBlock; }
uint32_t within(Who who) { return who % kThreadsOfBlock; }
uint32_t warp_of(Who who) {
  const uint32_t number = within(who);
  return number < kWarps ? number / 32 : number == kBlock ? kBlock : number - kWarps;
}

Who joined(Who a, Who b) {
  if (a == kNobody || a == b) return b;
  if (a == kSeveralBlocks || block_of(a) != block_of(b)) return kSeveralBlocks;
  const Who first = block_of(a) * kThreadsOfBlock;
  return first + (warp_of(a) == warp_of(b) && within(a) != kBlock ? kWarps + warp_of(a) : kBlock);
}

}  // namespace

Who thread_of(uint32_t block, uint32_t thread) { return block * kThreadsOfBlock + thread; }

std::string describe(Who who) {
  if (who == kSeveralBlocks) return "threads of several blocks";
  const std::string block = " of block " + std::to_string(block_of(who));
  if (within(who) < kWarps) return "thread " + std::to_string(within(who)) + block;
  if (within(who) == kBlock) return "threads" + block;
  return "threads of warp " + std::to_string(warp_of(who)) + block;
}

void History::start_block(uint32_t block) {
  block_ = block;
  barrier_ = ++now_;
  warp_syncs_.assign(kWarps, {0, 0});
}

void History::sync_warp(Who warp, uint32_t mask) {
  ++now_;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) warp_syncs_[within(warp) + lane] = {now_, mask};
}

bool History::ordered(const Visit& earlier, Who thread) const {
  if (earlier.who == kNobody || earlier.who == thread) return true;
  if (earlier.who == kSeveralBlocks) return false;
  const uint32_t other = block_of(earlier.who);
  if (other != block_) return earlier.when < fences_[other] && earlier.when < fences_[block_];
  if (earlier.when < barrier_) return true;
  if (warp_of(earlier.who) != warp_of(thread)) return false;
  const WarpSync& sync = warp_syncs_[within(thread)];
  const uint32_t number = within(earlier.who);
  const uint32_t lanes = number < kWarps ? 1u << number % 32 : ~0u;
  return earlier.when < sync.when && (sync.mask & lanes) == lanes;
}

Who History::touch(Traces& traces, Who thread, Touch how) {
  if (!ordered(traces.write, thread)) return traces.write.who;
  if (how != Touch::kAtomic && !ordered(traces.atomic, thread)) return traces.atomic.who;
  if (how != Touch::kRead && !ordered(traces.read, thread)) return traces.read.who;
  if (how == Touch::kWrite)
    traces = {{}, {thread, now_}, {}};
  else
    add(how == Touch::kRead ? traces.read : traces.atomic, thread);
  return kNobody;
}

// What comes after all earlier ones stands for them.
void History::add(Visit& visits, Who thread) const {
  visits = {ordered(visits, thread) ? thread : joined(visits.who, thread), now_};
}

}  // namespace ptx
