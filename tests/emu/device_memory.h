// Which bytes of the host stand for a GPU's memory. The shim lets kernels touch all of them and
// leaves the rest to the sanitizers; tests/ptx refuses every other byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace emu {

struct Extent {
  size_t bytes, granule;  // granule: of an element
};

// By address.
std::map<uintptr_t, Extent>& device_memory();

// Stands for it as long as it lives.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  template <typename T>
  DeviceMemory(const T* begin, size_t count)
      : DeviceMemory(reinterpret_cast<uintptr_t>(begin), {count * sizeof(T), sizeof(T)}) {}
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

 private:
  DeviceMemory(uintptr_t begin, Extent extent);
  uintptr_t begin_ = 0;
};

}  // namespace emu
