#include "async_copies.h"

#include <cstring>

#include "accesses.h"

namespace ptx {

std::array<std::deque<AsyncCopies::Group>, kLanes> AsyncCopies::filled() {
  std::array<std::deque<Group>, kLanes> groups;
  groups.fill(std::deque<Group>(1));
  return groups;
}

std::vector<AsyncCopy> AsyncCopies::take(int lane, size_t pending) {
  std::vector<AsyncCopy> taken;
  for (std::deque<Group>& groups = groups_[lane]; groups.size() > pending + 1; groups.pop_front())
    taken.insert(taken.end(), groups.front().begin(), groups.front().end());
  return taken;
}

namespace {

// Of `bytes` at `from`, in pieces whose size divides them.
void read(Warp& warp, LaneAccess from, uint32_t bytes, char* to) {
  const uint32_t piece = bytes % 4 == 0 ? 4 : bytes % 2 == 0 ? 2 : 1;
  for (uint32_t i = 0; i < bytes; i += piece)
    memcpy(to + i, touch_global(warp, {from.address + i, piece, from.how, from.thread}), piece);
}

// cp.async [shared], [global], bytes (, bytes to read: the rest are zeros)
template <bool kPartial>
void start(Warp& warp, const Instruction& at, uint32_t lanes) {
  const uint32_t bytes = warp.lanes<uint32_t>(at.operand[4])[0];
  const Access to = access_at<uint32_t>(warp, at, 0, lanes, bytes, Touch::kWrite);
  const Access from = access_at<uint64_t>(warp, at, 2, lanes, bytes, Touch::kRead);
  Counts& counts = warp.block.launch.counts;
  counts.add_global(at, from);
  counts.add_shared(to);
  for_each_lane(lanes, [&](int lane) {
    AsyncCopy copy{of_lane(warp, to, lane), {}};
    const uint32_t count = kPartial ? warp.lanes<uint32_t>(at.operand[5])[lane] : bytes;
    if (from.address[lane] % bytes != 0) throw Fault{"copies from a misaligned address"};
    if (count > bytes) throw Fault{"copies more than it has room for"};
    read(warp, of_lane(warp, from, lane), count, copy.data.data());
    warp.block.shared.expect(warp.block.launch.history, copy.to);
    warp.copies.add(lane, copy);
  });
}

void commit(Warp& warp, const Instruction&, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) { warp.copies.commit(lane); });
}

void deliver(Warp& warp, uint32_t lanes, size_t pending) {
  for_each_lane(lanes, [&](int lane) {
    for (const AsyncCopy& copy : warp.copies.take(lane, pending))
      memcpy(warp.block.shared.deliver(warp.block.launch.history, copy.to), copy.data.data(),
             copy.to.bytes);
  });
}

void wait_group(Warp& warp, const Instruction& at, uint32_t lanes) {
  deliver(warp, lanes, warp.lanes<uint32_t>(at.operand[0])[0]);
}

void wait_all(Warp& warp, const Instruction& at, uint32_t lanes) {
  commit(warp, at, lanes);
  deliver(warp, lanes, 0);
}

}  // namespace

void define_async_copies() {
  for (const char* const name : {"cp.async.ca.shared.global", "cp.async.cg.shared.global"}) {
    define({name, {4, kDisplacement, 8, kDisplacement, 4}, 0, start<false>});
    define({name, {4, kDisplacement, 8, kDisplacement, 4, 4}, 0, start<true>});
  }
  define({"cp.async.commit_group", {}, 0, commit});
  define({"cp.async.wait_group", {4}, 0, wait_group});
  define({"cp.async.wait_all", {}, 0, wait_all});
}

}  // namespace ptx
