// Decodes one kernel: names become places in the register file, opcodes become forms.
#pragma once

#include <map>
#include <unordered_map>

#include "forms.h"
#include "scanner.h"

namespace ptx {

using Symbols = std::unordered_map<std::string, uint64_t>;

class Parser {
 public:
  // `symbols`: the file's variables. The scanner stands behind `.entry`.
  Parser(Scanner scanner, const Symbols& symbols, const std::vector<std::string>& dynamic_shared);

  void parse(Kernel& kernel);

 private:
  struct Register {
    int32_t offset;
    int width;
  };
  // As written: with its type to be found.
  struct Operand {
    enum { kRegister, kInteger, kFloat, kLabel } kind = kInteger;
    Register where{};
    uint64_t bits = 0;
    int float_width = 0;
    std::string label;
    bool grouped = false;  // inside of braces
  };

  void parse_parameters();
  void parse_limits();
  void parse_body();
  void parse_directive();
  void parse_registers();
  void parse_shared();
  void parse_call_parameter();
  void parse_source_line();
  SourcePlace parse_place();
  void parse_statement();
  void parse_guard(Instruction& to);
  void parse_call(Instruction& to);
  std::vector<Operand> parse_operands();
  void parse_operand(std::vector<Operand>& to, bool grouped);
  void parse_address(std::vector<Operand>& to);
  Operand parse_number();
  static Operand in_register(Register where);
  Operand named(const std::string& name);

  void decode(const std::string& opcode, const std::vector<Operand>& operands, Instruction& to);
  bool fits(const Form& form, const std::vector<Operand>& operands) const;
  int32_t constant(const Operand& operand, int width);
  Register allocate(int width);
  Operand special(const std::string& name);
  void resolve_labels();

  Scanner scan_;
  Symbols symbols_;
  Kernel* kernel_ = nullptr;
  const std::vector<std::string>& dynamic_shared_;  // names of it
  uint32_t shared_bytes_ = 0;
  std::vector<std::unordered_map<std::string, Register>> scopes_;
  std::unordered_map<std::string, int32_t> constants_, labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;  // instructions whose target has no place yet
  std::map<SourcePlace, SourcePlace> callers_;         // of inlined code, as last seen
  SourcePlace source_, outermost_;
};

}  // namespace ptx
