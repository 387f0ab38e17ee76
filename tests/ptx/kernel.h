// A kernel of a PTX file, decoded into what the machine runs.
#pragma once

#include <compare>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "lanes.h"

namespace ptx {

constexpr int kMostOperands = 20;
constexpr int kRegisterAlignment = 64;  // bytes

// Values of all lanes lie side by side, in registers and constants alike.
using Pred = uint8_t;  // 0 or 1

class Warp;
struct Instruction;
using Execute = void (*)(Warp&, const Instruction&, uint32_t lanes);

enum class Kind {
  kPlain,       // each lane for itself
  kCollective,  // waits for the lanes that its last operand names
  kWholeWarp,   // waits for all lanes
  kBarrier,
  kBranch,
  kExit
};

// A typed form of an opcode: add.s32 of three 32-bit operands.
struct Form {
  std::string name;
  std::vector<int> widths;  // bytes per lane of each operand
  int results;              // how many operands are; they come first
  Execute execute;
  Kind kind = Kind::kPlain;
  bool in_double = false;  // computes in double precision
  mutable bool executed = false;
};

struct SourcePlace {
  int32_t file = 0, line = 0, column = 0;
  auto operator<=>(const SourcePlace&) const = default;
};

struct Instruction {
  const Form* form;
  int32_t operand[kMostOperands];  // offset of a register's lanes; ~offset of a constant's
  int32_t guard;                   // register; kNoGuard: none
  bool guard_negated;
  int32_t target;                 // of a branch: index of an instruction
  int32_t line;                   // in the PTX file
  SourcePlace source, outermost;  // outermost: where the kernel calls what contains `source`
};
constexpr int32_t kNoGuard = INT32_MIN;

enum class Special { kTid, kNtid, kCtaid, kNctaid, kLaneid };

struct SpecialRegister {
  Special which;
  int axis;  // x, y, z
  int32_t offset;
};

struct Parameter {
  std::string name;
  uint32_t offset, bytes;
};

struct SharedVariable {
  uint32_t offset, bytes;
};

struct Kernel {
  std::string name;  // demangled
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t most_threads = 1024;        // .maxntid
  std::vector<SharedVariable> shared;  // apart, so that a step beyond the end of one is seen
  uint32_t dynamic_shared_offset = 0;
  uint32_t register_bytes = 0;
  std::vector<char> constants;
  std::vector<SpecialRegister> specials;
  std::vector<Instruction> code;
};

// What the file says is wrong, or not known here.
struct Refusal : std::runtime_error {
  using runtime_error::runtime_error;
};

}  // namespace ptx
