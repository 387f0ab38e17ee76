// The masks of the engine's dropout as a tensor: for the reference, which must see the same ones,
// and for tests of their statistics.
#include <ATen/ops/ones.h>

#include "../engine/context.h"
#include "guard.h"
#include "ops.h"

namespace fused_recoder {

at::Tensor dropout_mask(const at::Tensor& seed, int64_t stream, int64_t sample, double p,
                        int64_t time, int64_t T, int64_t B, int64_t units, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(seed.numel() == 1 && seed.scalar_type() == at::kLong,
                    "seed must be one int64, got ", seed.sizes(), " of ", seed.scalar_type());
  TORCH_CHECK_VALUE(p >= 0 && p < 1, "p must be in [0, 1), got ", p);
  TORCH_CHECK_VALUE(stream >= 0 && stream < kDropoutStreams && sample >= 0 &&
                        sample <= kMaxSamples && time >= 0 && T > 0 && B > 0 && units > 0,
                    "stream, sample, time and sizes must not be negative or empty");
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble,
                   "dtype must be float32 or float64, got ", dtype);
  if (p == 0) return at::ones({T, B, units}, seed.options().dtype(dtype));
  const OpGuard guard(seed);
  const at::Tensor out = at::empty({T, B, units}, seed.options().dtype(dtype));
  const at::Tensor dense_seed = seed.contiguous();
  const Dropout dropout =
      make_dropout(dense_seed.const_data_ptr<int64_t>(), static_cast<uint32_t>(stream), p);
  const Launch launch = launch_on(seed.device());
  const auto fill = [&](const auto& kernels, auto* data) {
    using A = std::remove_pointer_t<decltype(data)>;
    for (int64_t t = 0; t < T; ++t)
      kernels.dropout_mask(launch,
                           DropoutMask<A>{B, units, dropout, static_cast<uint32_t>(time + t),
                                          static_cast<uint32_t>(sample), data + t * B * units});
  };
  if (dtype == at::kDouble)
    fill(kernels_for<double>(seed.device()), out.mutable_data_ptr<double>());
  else
    fill(kernels_for<float>(seed.device()), out.mutable_data_ptr<float>());
  check_launches(seed.device());
  return out;
}

}  // namespace fused_recoder
