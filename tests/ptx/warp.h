// A warp: the registers of its 32 lanes, and where each lane is in the kernel.
//
// Lanes at the same instruction form a front. The front that is furthest behind runs until it meets
// the next one, so that lanes that a branch has parted come together again where their ways do.
#pragma once

#include "async_copies.h"
#include "fault.h"
#include "kernel.h"

namespace ptx {

struct Block;

class Warp {
 public:
  struct Front {
    int32_t at;  // index of an instruction
    uint32_t lanes;
    bool waits = false;
  };

  Warp(Block& block, uint32_t number, char* registers);

  template <typename T>
  T* lanes(int32_t operand) {
    const char* const at = operand >= 0 ? registers_ + operand : constants_ + ~operand;
    return reinterpret_cast<T*>(const_cast<char*>(at));
  }

  // Lanes whose value comes from a register or from shared memory that nobody has written. nvcc
  // reads ahead of a condition and throws the value away, so that only its use is refused.
  uint32_t undefined(int32_t operand) const {
    return operand >= 0 ? undefined_[operand / kRegisterAlignment] : 0;
  }
  void set_undefined(int32_t result, uint32_t lanes, uint32_t undefined) {
    uint32_t& kept = undefined_[result / kRegisterAlignment];
    kept = (kept & ~lanes) | (undefined & lanes);
  }
  void refuse_undefined(int32_t operand, uint32_t lanes, const char* what) const;
  void remember_unwritten(const Instruction& at) { unwritten_ = &at; }

  // Until no lane can go on by itself. Returns whether any could.
  bool run();
  void pass_barrier();  // all fronts are at one
  const std::vector<Front>& fronts() const { return fronts_; }
  [[noreturn]] void refuse(const Front& front, const std::string& what, int lane = -1) const;
  std::string whereabouts() const;  // of all lanes

  Block& block;
  const uint32_t first_thread;  // of the block
  const uint32_t existing;      // the last warp of a block may have less than 32 lanes
  uint32_t exited = 0;
  AsyncCopies copies;

 private:
  void set_special_registers();
  void advance(Front front);
  void execute(const Instruction& at, uint32_t lanes);
  void branch(const Front& front);
  void leave(const Front& front);
  void meet(const Front& front);
  uint32_t complete(const Front& front);
  uint32_t guarded(const Front& front);
  void put(Front front);

  char* const registers_;
  const char* const constants_;
  const std::vector<Instruction>& code_;
  std::vector<Front> fronts_;               // the furthest behind comes last
  std::vector<uint32_t> undefined_;         // by register
  const Instruction* unwritten_ = nullptr;  // the last that has read what nobody has written
};

}  // namespace ptx
