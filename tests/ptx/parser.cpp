#include "parser.h"

#include <algorithm>
#include <cstring>

namespace ptx {
namespace {

int width_of(Scanner& scan, std::string_view type) {
  if (type == ".pred") return sizeof(Pred);
  const int bits = type.size() > 2 ? std::atoi(std::string(type.substr(2)).c_str()) : 0;
  if (bits < 8) scan.fail("unknown type " + std::string(type));
  return bits / 8;
}

uint32_t rounded_up(uint32_t value, uint32_t to) { return (value + to - 1) / to * to; }

// .align 8 .b8 name[80], or .u64 name
struct Declaration {
  uint32_t alignment, bytes;
  std::string name;
};

Declaration parse_declaration(Scanner& scan) {
  Declaration found{1, 0, ""};
  std::string_view type = scan.word();
  if (type == ".align") {
    found.alignment = scan.integer();
    type = scan.word();
  }
  const uint32_t width = width_of(scan, type);
  found.alignment = std::max(found.alignment, width);
  found.name = scan.word();
  found.bytes = width;
  if (scan.take('[')) {
    found.bytes = scan.peek() == ']' ? 0 : width * scan.integer();
    scan.expect(']');
  }
  return found;
}

}  // namespace

Parser::Parser(Scanner scanner, const Symbols& symbols,
               const std::vector<std::string>& dynamic_shared)
    : scan_(scanner), symbols_(symbols), dynamic_shared_(dynamic_shared) {}

void Parser::parse(Kernel& kernel) {
  kernel_ = &kernel;
  scan_.word();  // the name
  parse_parameters();
  parse_limits();
  parse_body();
  kernel.dynamic_shared_offset = shared_bytes_;
  resolve_labels();
}

void Parser::parse_parameters() {
  scan_.expect('(');
  while (!scan_.take(')')) {
    scan_.expect(".param");
    const Declaration found = parse_declaration(scan_);
    const uint32_t offset = rounded_up(kernel_->parameter_bytes, found.alignment);
    kernel_->parameters.push_back({found.name, offset, found.bytes});
    kernel_->parameter_bytes = offset + found.bytes;
    symbols_[found.name] = offset;
    scan_.take(',');
  }
}

void Parser::parse_limits() {
  while (scan_.peek() == '.') {
    const std::string limit(scan_.word());
    uint32_t product = 1;
    do product *= scan_.integer();
    while (scan_.take(','));
    if (limit == ".maxntid" || limit == ".reqntid")
      kernel_->most_threads = product;
    else if (limit != ".minnctapersm")
      scan_.fail("unknown directive " + limit);
  }
}

void Parser::parse_body() {
  scan_.expect('{');
  scopes_.emplace_back();
  while (!scopes_.empty()) {
    if (scan_.take('{'))
      scopes_.emplace_back();
    else if (scan_.take('}'))
      scopes_.pop_back();
    else if (scan_.peek() == '.')
      parse_directive();
    else
      parse_statement();
  }
}

void Parser::parse_directive() {
  const std::string name(scan_.word());
  if (name == ".loc") return parse_source_line();
  if (name == ".reg")
    parse_registers();
  else if (name == ".shared")
    parse_shared();
  else if (name == ".param")
    parse_call_parameter();
  else if (name != ".pragma")
    scan_.fail(name + " is not modelled");
  scan_.until(';');
}

void Parser::parse_source_line() {
  const SourcePlace place = parse_place();
  if (place.line != 0) source_ = place;  // 0: nowhere in particular
  callers_.erase(place);
  if (scan_.take(',')) {  // function_name $L__info_string0, inlined_at 1 47 5
    scan_.expect("function_name");
    scan_.word();
    scan_.expect(',');
    scan_.expect("inlined_at");
    callers_[place] = parse_place();
  }
  outermost_ = source_;
  for (size_t i = 0; i < callers_.size() && callers_.contains(outermost_); ++i)
    outermost_ = callers_[outermost_];
}

SourcePlace Parser::parse_place() {
  SourcePlace place;
  place.file = scan_.integer();
  place.line = scan_.integer();
  place.column = scan_.integer();
  return place;
}

// .reg .b32 %r<5>; or .reg .b32 %temp;
void Parser::parse_registers() {
  const int width = width_of(scan_, scan_.word());
  const std::string name(scan_.word());
  if (!scan_.take('<')) {
    scopes_.back()[name] = allocate(width);
    return;
  }
  const int64_t count = scan_.integer();
  for (int64_t i = 0; i < count; ++i) scopes_.back()[name + std::to_string(i)] = allocate(width);
}

void Parser::parse_shared() {
  // A multiple of what the banks hold: the banks of a variable's elements stay as they were.
  constexpr uint32_t kApart = 128;
  const Declaration found = parse_declaration(scan_);
  symbols_[found.name] = shared_bytes_;
  kernel_->shared.push_back({shared_bytes_, found.bytes});
  shared_bytes_ = rounded_up(shared_bytes_ + found.bytes + kApart, kApart);
}

// Of a call: the same as a register, because all lanes have their own.
void Parser::parse_call_parameter() {
  const Declaration found = parse_declaration(scan_);
  if (found.bytes != 4 && found.bytes != 8) scan_.fail("call with a struct");
  scopes_.back()[found.name] = allocate(found.bytes);
}

Parser::Register Parser::allocate(int width) {
  kernel_->register_bytes = rounded_up(kernel_->register_bytes, kRegisterAlignment);
  const Register found{static_cast<int32_t>(kernel_->register_bytes), width};
  kernel_->register_bytes += width * kLanes;
  return found;
}

void Parser::parse_statement() {
  Instruction to{};
  to.guard = kNoGuard;
  to.source = source_;
  to.outermost = outermost_;
  parse_guard(to);
  to.line = scan_.line();
  const std::string opcode(scan_.word());
  if (scan_.take(':')) {
    labels_[opcode] = static_cast<int32_t>(kernel_->code.size());
    return;
  }
  if (opcode.starts_with("call"))
    parse_call(to);
  else
    decode(opcode, parse_operands(), to);
  scan_.expect(';');
  if (to.guard != kNoGuard && to.form->kind != Kind::kPlain && to.form->kind != Kind::kBranch &&
      to.form->kind != Kind::kExit)
    scan_.fail("predicated " + opcode);
  kernel_->code.push_back(to);
}

void Parser::parse_guard(Instruction& to) {
  if (!scan_.take('@')) return;
  to.guard_negated = scan_.take('!');
  const Operand guard = named(std::string(scan_.word()));
  if (guard.kind != Operand::kRegister || guard.where.width != sizeof(Pred))
    scan_.fail("a guard that is no predicate");
  to.guard = guard.where.offset;
}

// call.uni __assertfail, (param0, param1, ...)
void Parser::parse_call(Instruction& to) {
  const std::string callee(scan_.peek() == '(' ? "a function with a result" : scan_.word());
  std::vector<Operand> operands;
  if (scan_.take(',')) {
    scan_.expect('(');
    do parse_operand(operands, false);
    while (scan_.take(','));
    scan_.expect(')');
  }
  decode("call " + callee, operands, to);
}

std::vector<Parser::Operand> Parser::parse_operands() {
  std::vector<Operand> operands;
  if (scan_.peek() == ';') return operands;
  do {
    parse_operand(operands, false);
    if (scan_.take('|')) parse_operand(operands, false);
  } while (scan_.take(','));
  return operands;
}

void Parser::parse_operand(std::vector<Operand>& to, bool grouped) {
  const char first = scan_.peek();
  if (first == '{') {
    scan_.take('{');
    do parse_operand(to, true);
    while (scan_.take(','));
    scan_.expect('}');
  } else if (first == '[') {
    parse_address(to);
  } else {
    const bool number = first == '-' || std::isdigit(static_cast<unsigned char>(first));
    to.push_back(number ? parse_number() : named(std::string(scan_.word())));
    to.back().grouped = grouped;
  }
}

// [%rd1+16]: the base and what is added to it.
void Parser::parse_address(std::vector<Operand>& to) {
  scan_.expect('[');
  to.push_back(named(std::string(scan_.word())));
  Operand displacement;
  if (scan_.take('+')) displacement.bits = scan_.integer();
  scan_.expect(']');
  to.push_back(displacement);
}

// 12, -3, 0x1F, 0f3F800000 and 0d3FF0000000000000 (bits)
Parser::Operand Parser::parse_number() {
  Scanner ahead = scan_;
  const std::string word(ahead.peek() == '-' ? "-" : ahead.word());
  Operand found;
  if (word.starts_with("0f") || word.starts_with("0d")) {
    found.kind = Operand::kFloat;
    found.float_width = word[1] == 'f' ? 4 : 8;
    found.bits = std::stoull(word.substr(2), nullptr, 16);
    scan_ = ahead;
  } else {
    found.bits = scan_.integer();
  }
  return found;
}

Parser::Operand Parser::in_register(Register where) {
  Operand found;
  found.kind = Operand::kRegister;
  found.where = where;
  return found;
}

Parser::Operand Parser::named(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
    if (const auto found = scope->find(name); found != scope->end())
      return in_register(found->second);
  if (name[0] == '%') return special(name);
  Operand found;
  if (name.starts_with("$L")) {
    found.kind = Operand::kLabel;
    found.label = name;
    return found;
  }
  // Behind what was declared: everything is before it is used.
  if (std::find(dynamic_shared_.begin(), dynamic_shared_.end(), name) != dynamic_shared_.end()) {
    found.bits = shared_bytes_;
    return found;
  }
  const auto symbol = symbols_.find(name);
  if (symbol == symbols_.end()) scan_.fail("unknown name " + name);
  found.bits = symbol->second;
  return found;
}

// %tid.x and the like are ordinary registers that every warp starts with.
Parser::Operand Parser::special(const std::string& name) {
  static const std::unordered_map<std::string, Special> kNames = {{"%tid", Special::kTid},
                                                                  {"%ntid", Special::kNtid},
                                                                  {"%ctaid", Special::kCtaid},
                                                                  {"%nctaid", Special::kNctaid},
                                                                  {"%laneid", Special::kLaneid}};
  const size_t dot = name.find('.');
  const auto which = kNames.find(name.substr(0, dot));
  if (which == kNames.end()) scan_.fail("special register " + name + " is not modelled");
  const int axis = dot == std::string::npos ? 0 : name[dot + 1] - 'x';
  const Register where = allocate(sizeof(uint32_t));
  kernel_->specials.push_back({which->second, axis, where.offset});
  scopes_.front()[name] = where;
  return in_register(where);
}

bool Parser::fits(const Form& form, const std::vector<Operand>& operands) const {
  if (form.widths.size() != operands.size()) return false;
  for (int i = 0; i < form.results; ++i)
    if (operands[i].kind != Operand::kRegister) return false;
  for (size_t i = 0; i < operands.size(); ++i) {
    const Operand& operand = operands[i];
    if (operand.kind == Operand::kRegister && operand.where.width != form.widths[i]) return false;
    if (operand.kind == Operand::kFloat && operand.float_width != form.widths[i]) return false;
  }
  return true;
}

void Parser::decode(const std::string& opcode, const std::vector<Operand>& operands,
                    Instruction& to) {
  std::vector<Operand> rest = operands;
  std::string name = opcode;
  if (!rest.empty() && rest.back().kind == Operand::kLabel) {
    jumps_.emplace_back(kernel_->code.size(), rest.back().label);
    rest.pop_back();
  }
  // Parameters of calls are registers here.
  if (name.starts_with("st.param")) {
    name = "mov" + name.substr(strlen("st.param"));
    rest.erase(rest.begin() + 1);
  }
  if (name.starts_with("mov.") && !rest.empty() && (rest.front().grouped || rest.back().grouped))
    name += rest.front().grouped ? ".unpack" : ".pack";
  for (const Form* form : forms_named(name))
    if (to.form == nullptr && fits(*form, rest)) to.form = form;
  if (to.form == nullptr) {
    std::string widths;
    for (const Operand& operand : rest)
      widths += operand.kind == Operand::kRegister ? " b" + std::to_string(8 * operand.where.width)
                                                   : " constant";
    scan_.fail(name + " with operands" + (widths.empty() ? " (none)" : widths) + " is not known");
  }
  for (size_t i = 0; i < rest.size(); ++i)
    to.operand[i] = rest[i].kind == Operand::kRegister ? rest[i].where.offset
                                                       : constant(rest[i], to.form->widths[i]);
}

int32_t Parser::constant(const Operand& operand, int width) {
  const uint64_t bits = width == sizeof(Pred) ? operand.bits != 0 : operand.bits;
  const std::string key = std::to_string(width) + ":" + std::to_string(bits);
  const auto [found, added] =
      constants_.emplace(key, ~static_cast<int32_t>(kernel_->constants.size()));
  if (added) {
    kernel_->constants.resize(kernel_->constants.size() + rounded_up(width * kLanes, 64));
    for (int lane = 0; lane < kLanes; ++lane)
      memcpy(kernel_->constants.data() + ~found->second + lane * width, &bits, width);
  }
  return found->second;
}

void Parser::resolve_labels() {
  for (const auto& [index, label] : jumps_) {
    const auto found = labels_.find(label);
    if (found == labels_.end()) throw Refusal("no label " + label);
    kernel_->code[index].target = found->second;
  }
}

}  // namespace ptx
