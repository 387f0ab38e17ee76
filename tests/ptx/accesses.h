// How instructions reach memory. An address takes two operands: a register, or the address of a
// variable, and a displacement.
#pragma once

#include "forms.h"
#include "machine.h"

namespace ptx {

enum class Space { kGlobal, kShared };

constexpr int kDisplacement = sizeof(uint64_t);

template <typename Address>
Access access_at(Warp& warp, const Instruction& at, int operand, uint32_t lanes, uint32_t bytes,
                 Touch how) {
  Access found{{}, lanes, bytes, how};
  warp.refuse_undefined(at.operand[operand], lanes, "the address");
  const Address* const base = warp.lanes<Address>(at.operand[operand]);
  const uint64_t* const displacement = warp.lanes<uint64_t>(at.operand[operand + 1]);
  for_lanes(lanes, [&](int lane) { found.address[lane] = base[lane] + displacement[lane]; });
  return found;
}

inline LaneAccess of_lane(const Warp& warp, const Access& access, int lane) {
  return {access.address[lane], access.bytes, access.how,
          thread_of(warp.block.number, warp.first_thread + lane)};
}

// Calls body(lane) and says of a fault whose it is.
template <typename Body>
void for_each_lane(uint32_t lanes, const Body& body) {
  for_lanes(lanes, [&](int lane) {
    try {
      body(lane);
    } catch (Fault& fault) {
      fault.lane = lane;
      throw;
    }
  });
}

inline char* touch_global(Warp& warp, const LaneAccess& access) {
  return warp.block.launch.memory.touch(warp.block.launch.history, access);
}
inline char* touch_shared(Warp& warp, const LaneAccess& access) {
  return warp.block.shared.touch(warp.block.launch.history, access);
}

// Calls body(lane, its place in memory). Returns the lanes whose place nobody has written.
template <Space kSpace, typename Body>
uint32_t for_places(Warp& warp, const Instruction& at, const Access& access, const Body& body) {
  Counts& counts = warp.block.launch.counts;
  uint32_t unwritten = 0;
  if constexpr (kSpace == Space::kGlobal)
    counts.add_global(at, access);
  else
    counts.add_shared(access);
  for_each_lane(access.lanes, [&](int lane) {
    const LaneAccess own = of_lane(warp, access, lane);
    if constexpr (kSpace == Space::kGlobal) {
      body(lane, touch_global(warp, own));
    } else {
      body(lane, touch_shared(warp, own));
      unwritten |= uint32_t(!warp.block.shared.written(own)) << lane;
    }
  });
  return unwritten;
}

}  // namespace ptx
