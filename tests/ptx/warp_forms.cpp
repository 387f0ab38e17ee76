// What the lanes of a warp do together. The last operand names those that take part.
#include "forms.h"
#include "machine.h"

namespace ptx {
namespace {

enum class Shuffle { kIdx, kBfly, kDown };

struct Source {
  int lane;
  bool inside;  // of the segment
};

// The ISA's rule. `clamp` holds the last lane of a segment in its low bits, above it the bits of
// the lane that a segment has in common.
template <Shuffle kHow>
Source source_of(int lane, uint32_t by, uint32_t clamp) {
  const int segment = clamp >> 8 & 31, last = (lane & segment) | (clamp & 31 & ~segment);
  const int moved = by & 31;
  const int from = kHow == Shuffle::kIdx    ? (lane & segment) | (moved & ~segment)
                   : kHow == Shuffle::kBfly ? lane ^ moved
                                            : lane + moved;
  return from <= last ? Source{from, true} : Source{lane, false};
}

// result | inside, value, by, clamp, mask
template <Shuffle kHow>
void shuffle(Warp& warp, const Instruction& at, uint32_t lanes) {
  for (int i : {3, 4}) warp.refuse_undefined(at.operand[i], lanes, "the lane to read");
  uint32_t values[kLanes], undefined = 0;
  std::copy_n(warp.lanes<uint32_t>(at.operand[2]), kLanes, values);
  for_lanes(lanes, [&](int lane) {
    const Source from = source_of<kHow>(lane, warp.lanes<uint32_t>(at.operand[3])[lane],
                                        warp.lanes<uint32_t>(at.operand[4])[lane]);
    if (!(warp.lanes<uint32_t>(at.operand[5])[lane] >> from.lane & 1))
      throw Fault{"the shuffle reads lane " + std::to_string(from.lane) + ", which takes no part",
                  lane};
    undefined |= (warp.undefined(at.operand[2]) >> from.lane & 1) << lane;
    warp.lanes<uint32_t>(at.operand[0])[lane] = values[from.lane];
    warp.lanes<Pred>(at.operand[1])[lane] = from.inside;
  });
  warp.set_undefined(at.operand[0], lanes, undefined);
  warp.set_undefined(at.operand[1], lanes, 0);
}

// Of the lanes with the same mask.
void ballot(Warp& warp, const Instruction& at, uint32_t lanes) {
  warp.refuse_undefined(at.operand[1], lanes, "a vote");
  warp.set_undefined(at.operand[0], lanes, 0);
  const uint32_t* const masks = warp.lanes<uint32_t>(at.operand[2]);
  uint32_t votes = 0;
  for_lanes(lanes,
            [&](int lane) { votes |= uint32_t(warp.lanes<Pred>(at.operand[1])[lane]) << lane; });
  for_lanes(lanes,
            [&](int lane) { warp.lanes<uint32_t>(at.operand[0])[lane] = votes & masks[lane]; });
}

void sync(Warp& warp, const Instruction& at, uint32_t lanes) {
  const Who first = thread_of(warp.block.number, warp.first_thread);
  for (uint32_t left = lanes; left != 0;) {
    const uint32_t mask = warp.lanes<uint32_t>(at.operand[0])[std::countr_zero(left)];
    warp.block.launch.history.sync_warp(first, mask);
    left &= ~mask;
  }
}

}  // namespace

void define_warp() {
  const std::vector<int> widths = {4, sizeof(Pred), 4, 4, 4, 4};
  define({"shfl.sync.idx.b32", widths, 2, shuffle<Shuffle::kIdx>, Kind::kCollective});
  define({"shfl.sync.bfly.b32", widths, 2, shuffle<Shuffle::kBfly>, Kind::kCollective});
  define({"shfl.sync.down.b32", widths, 2, shuffle<Shuffle::kDown>, Kind::kCollective});
  define({"vote.sync.ballot.b32", {4, sizeof(Pred), 4}, 1, ballot, Kind::kCollective});
  define({"bar.warp.sync", {4}, 0, sync, Kind::kCollective});
}

}  // namespace ptx
