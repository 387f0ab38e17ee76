// Roundings that C++ has no operator for.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace ptx {

// a * b is exact in double; the sum's rounding error is, too (Knuth's two-sum).
inline float fused_towards_minus_infinity(float a, float b, float c) {
  const double product = double(a) * double(b), sum = product + double(c);
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  const double part = sum - product;
  const double error = (product - (sum - part)) + (double(c) - part);
  const float nearest = static_cast<float>(sum);
  const bool too_large = double(nearest) > sum || (double(nearest) == sum && error < 0);
  return too_large ? std::nextafter(nearest, -INFINITY) : nearest;
}

inline float flush(float a) {
  return std::fpclassify(a) == FP_SUBNORMAL ? std::copysign(0.0f, a) : a;
}

inline uint16_t to_half(float a) { return std::bit_cast<uint16_t>(static_cast<_Float16>(a)); }
inline float from_half(uint16_t a) { return static_cast<float>(std::bit_cast<_Float16>(a)); }

// To nearest, ties to even.
inline uint16_t to_bfloat16(float a) {
  if (std::isnan(a)) return 0x7fff;
  const uint32_t bits = std::bit_cast<uint32_t>(a);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat16(uint16_t a) { return std::bit_cast<float>(uint32_t(a) << 16); }

}  // namespace ptx
