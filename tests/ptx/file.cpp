#include "file.h"

#include <cxxabi.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "parser.h"

namespace ptx {
namespace {

std::string read(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Refusal("cannot read " + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t\r");
  std::string line(first == std::string_view::npos ? "" : text.substr(first, last - first + 1));
  std::replace(line.begin(), line.end(), '\t', ' ');
  return line;
}

}  // namespace

std::string demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

// What stands at the beginning of a line is the file's own; kernels are indented.
File::File(const std::string& path) : path_(path), text_(read(path)) {
  for (size_t begin = 0; begin < text_.size(); begin = text_.find('\n', begin) + 1) {
    lines_.push_back(begin);
    const std::string_view line = std::string_view(text_).substr(begin, 64);
    const int number = static_cast<int>(lines_.size());
    if (line.find(".entry ") < line.find('\n'))
      read_entry(begin + line.find(".entry ") + 7, number);
    else if (line.starts_with("\t.file"))
      read_source(begin + 6, number);
    else if (line.starts_with(".global"))
      read_variable(begin, number);
    else if (line.starts_with(".extern .shared"))
      dynamic_shared_.push_back(read_dynamic_shared(begin, number));
    if (text_.find('\n', begin) == std::string::npos) break;
  }
}

void File::read_entry(size_t begin, int line) {
  const std::string name(Scanner(text_, begin, line).word());
  entries_[demangled(name)] = {begin, line, nullptr};
}

void File::read_source(size_t begin, int line) {
  Scanner scan(text_, begin, line);
  const int number = static_cast<int>(scan.integer());
  scan.expect('"');
  sources_[number] = scan.until('"');
}

// .global .align 1 .b8 $str[76] = {99, 111, ...};
void File::read_variable(size_t begin, int line) {
  Scanner scan(text_, begin, line);
  scan.expect(".global");
  scan.expect(".align");
  scan.integer();
  scan.expect(".b8");
  const std::string name(scan.word());
  scan.expect('[');
  const size_t bytes = scan.integer();
  scan.expect(']');
  auto data = std::make_unique<char[]>(bytes);
  if (scan.take('=')) {
    scan.expect('{');
    size_t i = 0;
    do data[i++] = static_cast<char>(scan.integer());
    while (scan.take(',') && i < bytes);
    scan.expect('}');
  }
  symbols_[name] = reinterpret_cast<uint64_t>(data.get());
  registered_.emplace_back(data.get(), bytes);
  variables_.push_back(std::move(data));
}

// .extern .shared .align 16 .b8 name[];
std::string File::read_dynamic_shared(size_t begin, int line) {
  const std::string_view declaration = Scanner(text_, begin, line).until('[');
  return std::string(declaration.substr(declaration.rfind(' ') + 1));
}

const Kernel& File::kernel(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw Refusal(path_ + " has no kernel " + name);
  Entry& entry = found->second;
  if (entry.decoded == nullptr) {
    auto kernel = std::make_unique<Kernel>();
    kernel->name = name;
    try {
      Parser(Scanner(text_, entry.begin, entry.line), symbols_, dynamic_shared_).parse(*kernel);
    } catch (const Refusal& refusal) {
      throw Refusal(path_ + ", " + name + ": " + refusal.what());
    }
    entry.decoded = std::move(kernel);
  }
  return *entry.decoded;
}

std::string File::source(const SourcePlace& place) const {
  const auto file = sources_.find(place.file);
  if (file == sources_.end()) return "no source";
  const std::string& path = file->second;
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(place.line);
}

std::string File::place(const Instruction& at) const {
  const size_t begin = lines_[at.line - 1], end = text_.find('\n', begin);
  const std::string inlined = at.source == at.outermost ? "" : ", in " + source(at.outermost);
  return path_ + ":" + std::to_string(at.line) + " (" + source(at.source) + inlined +
         "): " + trimmed(std::string_view(text_).substr(begin, end - begin));
}

}  // namespace ptx
