// A PTX file. Kernels are decoded when they are first launched.
#pragma once

#include <map>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "../emu/device_memory.h"
#include "kernel.h"

namespace ptx {

std::string demangled(const std::string& name);

class File {
 public:
  explicit File(const std::string& path);

  // By its demangled name.
  const Kernel& kernel(const std::string& name);

  // The line of an instruction, and what it was compiled from.
  std::string place(const Instruction& at) const;
  std::string source(const SourcePlace& place) const;

 private:
  struct Entry {
    size_t begin;
    int line;
    std::unique_ptr<Kernel> decoded;
  };

  void read_entry(size_t begin, int line);
  void read_source(size_t begin, int line);
  void read_variable(size_t begin, int line);
  std::string read_dynamic_shared(size_t begin, int line);

  std::string path_, text_;
  std::vector<size_t> lines_;  // where they begin
  std::map<std::string, Entry> entries_;
  std::map<int, std::string> sources_;  // of .file
  std::unordered_map<std::string, uint64_t> symbols_;
  std::vector<std::unique_ptr<char[]>> variables_;
  std::vector<emu::DeviceMemory> registered_;
  std::vector<std::string> dynamic_shared_;  // names of the same memory
};

}  // namespace ptx
