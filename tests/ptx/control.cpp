// Branches, exits, barriers, fences and failing asserts.
#include "forms.h"
#include "machine.h"

namespace ptx {
namespace {

void nothing(Warp&, const Instruction&, uint32_t) {}

void fence(Warp& warp, const Instruction&, uint32_t) { warp.block.launch.history.fence(); }

const char* text_at(Warp& warp, int32_t operand, int lane) {
  return reinterpret_cast<const char*>(warp.lanes<uint64_t>(operand)[lane]);
}

// __assertfail(message, file, line, function, size of a character)
void fail_assert(Warp& warp, const Instruction& at, uint32_t lanes) {
  const int lane = std::countr_zero(lanes);
  throw Fault{std::string("device assert ") + text_at(warp, at.operand[0], lane) + " failed at " +
                  text_at(warp, at.operand[1], lane) + ":" +
                  std::to_string(warp.lanes<uint32_t>(at.operand[2])[lane]),
              lane};
}

}  // namespace

void define_control() {
  define({"bra", {}, 0, nothing, Kind::kBranch});
  define({"bra.uni", {}, 0, nothing, Kind::kBranch});
  define({"ret", {}, 0, nothing, Kind::kExit});
  define({"bar.sync", {4}, 0, nothing, Kind::kBarrier});
  define({"membar.gl", {}, 0, fence});
  define({"call __assertfail", {8, 8, 4, 8, 8}, 0, fail_assert});
}

}  // namespace ptx
