#include "warp.h"

#include <algorithm>

#include "file.h"
#include "machine.h"

namespace ptx {
namespace {

uint32_t first_lanes(uint32_t count) { return count >= kLanes ? kAllLanes : (1u << count) - 1; }

uint32_t component(const uint3& of, int axis) { return axis == 0 ? of.x : axis == 1 ? of.y : of.z; }
uint32_t component(const dim3& of, int axis) { return axis == 0 ? of.x : axis == 1 ? of.y : of.z; }

}  // namespace

Warp::Warp(Block& block, uint32_t number, char* registers)
    : block(block),
      first_thread(number * kLanes),
      existing(first_lanes(block.launch.threads() - number * kLanes)),
      registers_(registers),
      constants_(block.launch.kernel.constants.data()),
      code_(block.launch.kernel.code),
      fronts_{{0, existing}},
      undefined_(block.launch.kernel.register_bytes / kRegisterAlignment + 1, kAllLanes) {
  set_special_registers();
}

void Warp::set_special_registers() {
  const dim3 shape = block.launch.shape;
  for (const SpecialRegister& special : block.launch.kernel.specials) {
    set_undefined(special.offset, kAllLanes, 0);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t thread = first_thread + lane;
      const uint3 index{thread % shape.x, thread / shape.x % shape.y, thread / shape.x / shape.y};
      uint32_t& to = lanes<uint32_t>(special.offset)[lane];
      switch (special.which) {
        case Special::kTid:
          to = component(index, special.axis);
          break;
        case Special::kNtid:
          to = component(shape, special.axis);
          break;
        case Special::kCtaid:
          to = component(block.index, special.axis);
          break;
        case Special::kNctaid:
          to = component(block.launch.grid, special.axis);
          break;
        case Special::kLaneid:
          to = lane;
      }
    }
  }
}

void Warp::refuse_undefined(int32_t operand, uint32_t lanes, const char* what) const {
  const uint32_t bad = undefined(operand) & lanes;
  if (bad == 0) return;
  const std::string origin =
      unwritten_ == nullptr
          ? ", a register that nobody has written"
          : ", from shared memory that nobody has written: " + block.launch.file.place(*unwritten_);
  throw Fault{std::string(what) + " is undefined" + origin, std::countr_zero(bad)};
}

void Warp::refuse(const Front& front, const std::string& what, int lane) const {
  const Instruction& at = code_[front.at];
  const uint32_t thread = first_thread + (lane >= 0 ? lane : std::countr_zero(front.lanes));
  const uint3 index = block.index;
  throw emu::Error("ptx: " + what + "\n  in " + block.launch.kernel.name + ", block " +
                   std::to_string(index.x) + "," + std::to_string(index.y) + "," +
                   std::to_string(index.z) + ", thread " + std::to_string(thread) +
                   (lane >= 0 ? "" : " and others") + "\n  " + block.launch.file.place(at));
}

std::string Warp::whereabouts() const {
  char text[64];
  std::string all;
  for (const Front& front : fronts_) {
    snprintf(text, sizeof(text), "; lanes %08x are in line %d", front.lanes, code_[front.at].line);
    all += text;
  }
  snprintf(text, sizeof(text), "; lanes %08x have exited", exited);
  return exited != 0 ? all + text : all;
}

// In order, and one front for lanes in the same place: together nobody waits any longer.
void Warp::put(Front front) {
  if (front.lanes == 0) return;
  const auto behind = std::find_if(fronts_.begin(), fronts_.end(),
                                   [&](const Front& other) { return other.at <= front.at; });
  if (behind != fronts_.end() && behind->at == front.at) {
    behind->waits &= front.waits;
    behind->lanes |= front.lanes;
  } else {
    fronts_.insert(behind, front);
  }
}

bool Warp::run() {
  bool progress = false;
  while (true) {
    const auto next = std::find_if(fronts_.rbegin(), fronts_.rend(),
                                   [](const Front& front) { return !front.waits; });
    if (next == fronts_.rend()) return progress;
    const Front front = *next;
    fronts_.erase(next.base() - 1);
    advance(front);
    progress = true;
  }
}

uint32_t Warp::guarded(const Front& front) {
  const Instruction& at = code_[front.at];
  if (at.guard == kNoGuard) return front.lanes;
  refuse_undefined(at.guard, front.lanes, "the condition");
  const Pred* const guard = lanes<Pred>(at.guard);
  uint32_t taken = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    taken |= uint32_t((guard[lane] != 0) != at.guard_negated) << lane;
  return taken & front.lanes;
}

void Warp::execute(const Instruction& at, uint32_t lanes) {
  at.form->execute(*this, at, lanes);
  block.launch.counts.doubles += at.form->in_double;
}

// Until the front meets another one, or comes to something that concerns other lanes.
void Warp::advance(Front front) {
  int32_t meeting = INT32_MAX;
  for (const Front& other : fronts_)
    if (other.at > front.at) meeting = std::min(meeting, other.at);
  Counts& counts = block.launch.counts;
  try {
    for (; front.at < meeting; ++front.at) {
      const Instruction& at = code_[front.at];
      at.form->executed = true;
      if (at.form->kind == Kind::kBranch) return branch(front);
      if (at.form->kind == Kind::kExit) return leave(front);
      if (at.form->kind != Kind::kPlain) return meet(front);
      ++counts.instructions;
      const uint32_t taken = guarded(front);
      counts.lanes += std::popcount(taken);
      if (taken != 0) execute(at, taken);
    }
  } catch (const Fault& fault) {
    refuse(front, fault.what, fault.lane);
  }
  put(front);
}

void Warp::branch(const Front& front) {
  Counts& counts = block.launch.counts;
  const uint32_t taken = guarded(front);
  ++counts.instructions;
  counts.lanes += std::popcount(front.lanes);
  ++counts.branches;
  counts.parted += taken != 0 && taken != front.lanes;
  put({code_[front.at].target, taken});
  put({front.at + 1, front.lanes & ~taken});
}

void Warp::leave(const Front& front) {
  const uint32_t taken = guarded(front);
  ++block.launch.counts.instructions;
  block.launch.counts.lanes += std::popcount(taken);
  exited |= taken;
  put({front.at + 1, front.lanes & ~taken});
}

// The lanes of the front whose partners are all there.
uint32_t Warp::complete(const Front& front) {
  const Instruction& at = code_[front.at];
  if (at.form->kind == Kind::kBarrier) return 0;
  if (at.form->kind == Kind::kWholeWarp) return front.lanes == kAllLanes ? kAllLanes : 0;
  const int32_t last = at.operand[at.form->widths.size() - 1];
  refuse_undefined(last, front.lanes, "the mask");
  const uint32_t* const masks = lanes<uint32_t>(last);
  uint32_t ready = 0;
  for_lanes(front.lanes, [&](int lane) {
    const uint32_t mask = masks[lane];
    if (!(mask >> lane & 1)) throw Fault{"the lane is not in its own mask", lane};
    if ((mask & exited) != 0)
      throw Fault{"the mask names lane " + std::to_string(std::countr_zero(mask & exited)) +
                      ", which has exited",
                  lane};
    if ((mask & ~existing) != 0)
      throw Fault{"the mask names lanes that the block does not have", lane};
    bool together = (mask & ~front.lanes) == 0;
    for_lanes(mask & front.lanes, [&](int other) { together &= masks[other] == mask; });
    if (together) ready |= 1u << lane;
  });
  return ready;
}

void Warp::meet(const Front& front) {
  const uint32_t ready = complete(front);
  if (ready != 0) {
    ++block.launch.counts.instructions;
    block.launch.counts.lanes += std::popcount(ready);
    execute(code_[front.at], ready);
  }
  put({front.at + 1, ready});
  put({front.at, front.lanes & ~ready, true});
}

void Warp::pass_barrier() {
  for (Front& front : fronts_) {
    ++block.launch.counts.instructions;
    block.launch.counts.lanes += std::popcount(front.lanes);
    ++front.at;
    front.waits = false;
  }
}

}  // namespace ptx
