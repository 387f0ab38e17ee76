#include "approximate.h"

#include <bit>
#include <cmath>
#include <limits>

#include "forms.h"
#include "rounding.h"

namespace ptx {

uint64_t approximation_seed = 0;

double deviation(uint64_t argument) {
  if (approximation_seed == 0) return 0;
  uint64_t bits = argument + approximation_seed * 0x9e3779b97f4a7c15u;  // splitmix64
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
  bits ^= bits >> 31;
  const double uniform = double(bits >> 11) * 0x1p-52 - 1;
  return bits & 1 ? uniform : std::copysign(1.0, uniform);
}

float within_ulps(double exact, int ulps, uint64_t argument) {
  float value = static_cast<float>(exact);
  if (!std::isnormal(value)) return value;
  const double steps = std::round(deviation(argument) * ulps);
  for (int i = 0; i < std::fabs(steps); ++i)
    value = std::nextafter(value, std::copysign(INFINITY, static_cast<float>(steps)));
  return std::isinf(value) ? static_cast<float>(exact) : value;
}

float within(double exact, double bound, uint64_t argument) {
  const double wanted = exact + deviation(argument) * bound;
  float value = static_cast<float>(wanted);
  // Rounding must not leave the bound.
  if (std::fabs(double(value) - exact) > bound)
    value = std::nextafter(value, static_cast<float>(exact));
  return value;
}

namespace {

uint64_t bits_of(float a) { return std::bit_cast<uint32_t>(a); }

// "The maximum ulp error is 2 ulp from correctly rounded result across the full range of inputs."
// But exact for integers: CUDA's tanh of doubles takes 2^n from this instruction, and would be off
// by 1e-9 otherwise.
float power_of_two(float a) {
  a = flush(a);
  const double exact = std::exp2(double(a));
  return flush(a == std::rint(a) ? static_cast<float>(exact) : within_ulps(exact, 2, bits_of(a)));
}

// Keeps the upper 32 bits of argument and result; the ISA gives no bound, so one unit of the last
// bit that is kept.
double gross_reciprocal(double a) {
  constexpr uint64_t kUpper = 0xffffffff00000000u;
  const uint64_t argument = std::bit_cast<uint64_t>(a) & kUpper;
  const double upper = std::bit_cast<double>(argument);
  if (std::isnan(upper)) return std::bit_cast<double>(uint64_t(0x7fffffff00000000u));
  if (!std::isnormal(upper)) return 1 / std::copysign(std::isinf(upper) ? upper : 0.0, upper);
  const double exact = 1 / upper;
  if (!std::isnormal(exact)) return std::copysign(0.0, upper);
  const double varied = exact * (1 + deviation(argument) * 0x1p-20);
  return std::bit_cast<double>((std::bit_cast<uint64_t>(varied) + (uint64_t(1) << 31)) & kUpper);
}

}  // namespace

void define_approximations() {
  define<float(float)>("ex2.approx.ftz.f32", [](float a) { return flush(power_of_two(flush(a))); });
  define<float(float)>("ex2.approx.f32", [](float a) { return power_of_two(a); });
  // "The maximum ulp error is 1 across the full range of inputs."
  define<float(float)>("rcp.approx.ftz.f32", [](float a) {
    a = flush(a);
    return flush(within_ulps(1 / double(a), 1, bits_of(a)));
  });
  // 2^-22 between 1/2 and 2, relative to the result elsewhere.
  define<float(float)>("lg2.approx.f32", [](float a) {
    const double exact = std::log2(double(a));
    if (!std::isfinite(exact)) return static_cast<float>(exact);
    return within(exact, 0x1p-22 * (a > 0.5f && a < 2 ? 1 : std::fabs(exact)), bits_of(a));
  });
  define<float(float)>("tanh.approx.f32", [](float a) {
    const double exact = std::tanh(double(a));
    return within(exact, 0x1p-11 * std::fabs(exact), bits_of(a));
  });
  define<float(float, float)>("div.approx.f32", [](float a, float b) {
    if (std::fabs(b) > 0x1p126f) return std::isfinite(b) && std::isinf(a) ? NAN : 0 * a / b;
    return within_ulps(double(a) / double(b), 2, bits_of(a) << 32 | bits_of(b));
  });
  define<double(double)>("rcp.approx.ftz.f64", [](double a) { return gross_reciprocal(a); });
}

}  // namespace ptx
