// What holds while an op runs: its device is the current one, and autocast leaves its tensors alone
// (what products are rounded to, the spec says).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fused_recoder {

class OpGuard {
 public:
  explicit OpGuard(const at::Tensor& of) : device_(of.device()) {}

 private:
  const c10::DeviceGuard device_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

}  // namespace fused_recoder
