// Linked into a program of tests/emu, this runs its launches on the PTX instead of on fibers:
//   PTX_FILE    what nvcc made of the same kernels
//   PTX_SEED    varies approximate instructions (approximate.h); 0, the default: exact
//   PTX_REPORT  a file for what has been counted: see report()
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "approximate.h"
#include "file.h"
#include "forms.h"
#include "machine.h"

namespace ptx {
namespace {

const char* environment(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

File& file() {
  static auto* const kept = new File(environment("PTX_FILE", "PTX_FILE is not set"));
  return *kept;
}

std::map<std::string, Counts>& counts() {
  static auto* const kept = new std::map<std::string, Counts>;  // for the report
  return *kept;
}

// void kernel<float>(P<float>) of emu::NameOf<&(void kernel<float>(P<float>))>*. Other names are
// those of extern "C".
std::string kernel_name(const std::string& mangled) {
  const std::string name = demangled(mangled), before = "emu::NameOf<&(", after = ")>*";
  if (!name.starts_with(before)) return name;
  return name.substr(before.size(), name.size() - before.size() - after.size());
}

std::vector<char> pack(const Kernel& kernel, const emu::Call& call) {
  if (kernel.parameters.size() != call.arguments.size())
    throw Refusal(kernel.name + " has another number of parameters in PTX");
  std::vector<char> parameters(kernel.parameter_bytes, char(0xff));
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const Parameter& parameter = kernel.parameters[i];
    if (parameter.bytes != call.arguments[i].bytes)
      throw Refusal(parameter.name + " has " + std::to_string(parameter.bytes) +
                    " bytes in PTX and " + std::to_string(call.arguments[i].bytes) +
                    " on the host");
    memcpy(&parameters[parameter.offset], call.arguments[i].value, parameter.bytes);
  }
  return parameters;
}

void run(const emu::Call& call) {
  try {
    const Kernel& kernel = file().kernel(kernel_name(call.name));
    const uint32_t threads = call.block.x * call.block.y * call.block.z;
    if (threads > kernel.most_threads)
      throw Refusal(kernel.name + " is launched with " + std::to_string(threads) +
                    " threads and compiled for " + std::to_string(kernel.most_threads));
    const uint64_t blocks = uint64_t(call.grid.x) * call.grid.y * call.grid.z;
    if (blocks >= kSeveralBlocks / kThreadsOfBlock)
      throw Refusal(std::to_string(blocks) + " blocks are more than can be told apart");
    Launch launch{file(),
                  kernel,
                  call.grid,
                  call.block,
                  call.shared_bytes,
                  pack(kernel, call),
                  counts()[kernel.name],
                  History(blocks),
                  GlobalMemory()};
    launch.run();
  } catch (const Refusal& refusal) {
    throw emu::Error(std::string("ptx: ") + refusal.what());
  }
}

void print(std::ostream& to, const Requests& requests) {
  to << '\t' << requests.count << '\t' << requests.parts << '\t' << requests.least << '\t'
     << requests.bytes;
}

// Lines of fields with tabs between them: of kernels, of the places in them that load and store,
// of the forms that are known.
void report() {
  const char* const path = std::getenv("PTX_REPORT");
  if (path == nullptr) return;
  std::ofstream to(path);
  for (const auto& [kernel, of] : counts()) {
    to << "kernel\t" << kernel << '\t' << of.launches << '\t' << of.warps << '\t' << of.instructions
       << '\t' << of.lanes << '\t' << of.doubles << '\t' << of.branches << '\t' << of.parted;
    print(to, of.loads);
    print(to, of.stores);
    print(to, of.shared);
    to << '\n';
    for (const auto& [at, requests] : of.by_instruction) {
      to << "access\t" << kernel << '\t' << file().source(at->outermost) << '\t' << at->form->name;
      print(to, requests);
      to << '\n';
    }
  }
  for (const Form* form : all_forms())
    to << (form->executed ? "executed\t" : "not executed\t") << form->name << '\n';
}

const bool installed = [] {
  emu::launcher = run;
  approximation_seed = std::strtoull(environment("PTX_SEED", "0"), nullptr, 10);
  std::atexit(report);
  return true;
}();

}  // namespace
}  // namespace ptx
