#include "device_memory.h"

#include <utility>

namespace emu {

std::map<uintptr_t, Extent>& device_memory() {
  static auto* const kept = new std::map<uintptr_t, Extent>;  // arrays may be static, too
  return *kept;
}

DeviceMemory::DeviceMemory(uintptr_t begin, Extent extent) : begin_(extent.bytes > 0 ? begin : 0) {
  if (begin_ != 0) device_memory()[begin_] = extent;
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : begin_(std::exchange(other.begin_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(begin_, other.begin_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (begin_ != 0) device_memory().erase(begin_);
}

}  // namespace emu
