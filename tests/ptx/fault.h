// A rule was broken, by `lane` if it is known. The machine adds which thread, where in the kernel.
#pragma once

#include <string>

namespace ptx {

struct Fault {
  std::string what;
  int lane = -1;
};

}  // namespace ptx
