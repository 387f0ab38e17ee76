// Integers and floating-point numbers, results rounded as IEEE 754 and the PTX ISA say.
#include <cmath>
#include <limits>

#include "forms.h"
#include "rounding.h"

namespace ptx {
namespace {

constexpr auto plus = [](auto a, auto b) { return a + b; };
constexpr auto minus = [](auto a, auto b) { return a - b; };
constexpr auto times = [](auto a, auto b) { return a * b; };
constexpr auto negative = [](auto a) { return -a; };
constexpr auto times_plus = [](auto a, auto b, auto c) { return a * b + c; };
constexpr auto fused = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
constexpr auto over = [](auto a, auto b) { return a / b; };
constexpr auto inverse = [](auto a) { return 1 / a; };
constexpr auto magnitude = [](auto a) { return std::fabs(a); };

// A number and NaN: the number. -0 < +0.
constexpr auto larger = [](auto a, auto b) {
  if (std::isnan(a) || b > a) return b;
  return a == b && std::signbit(a) ? b : a;
};

// The sign of the first, the magnitude of the second.
constexpr auto with_sign = [](auto sign, auto a) { return std::copysign(a, sign); };

// On a GPU the result would be anything.
constexpr auto quotient = [](auto a, auto b) {
  using T = decltype(a);
  if (b == 0) throw Fault{"integer division by zero"};
  if (std::is_signed_v<T> && a == std::numeric_limits<T>::min() && b == T(-1))
    throw Fault{"integer division overflows"};
  return a / b;
};

void define_integers() {
  define<uint32_t(uint32_t, uint32_t)>("add.s32", plus);
  define<uint64_t(uint64_t, uint64_t)>("add.s64", plus);
  define<uint32_t(uint32_t, uint32_t)>("sub.s32", minus);
  define<uint64_t(uint64_t, uint64_t)>("sub.s64", minus);
  define<uint32_t(uint32_t, uint32_t)>("mul.lo.s32", times);
  define<uint64_t(uint64_t, uint64_t)>("mul.lo.s64", times);
  define<int64_t(int32_t, int32_t)>("mul.wide.s32", [](int64_t a, int64_t b) { return a * b; });
  define<uint64_t(uint32_t, uint32_t)>("mul.wide.u32",
                                       [](uint64_t a, uint64_t b) { return a * b; });
  define<uint32_t(uint32_t, uint32_t, uint32_t)>("mad.lo.s32", times_plus);
  define<int32_t(int32_t, int32_t)>("div.s32", quotient);
  define<int64_t(int64_t, int64_t)>("div.s64", quotient);
  define<uint32_t(uint32_t, uint32_t)>("div.u32", quotient);
  define<uint64_t(uint64_t, uint64_t)>("div.u64", quotient);
  define<int32_t(int32_t, int32_t)>("min.s32", [](auto a, auto b) { return a < b ? a : b; });
  define<uint32_t(uint32_t)>("neg.s32", negative);
  define<uint64_t(uint64_t)>("neg.s64", negative);
}

template <typename T>
void define_floats(const std::string& type) {
  const auto of = [&](const char* opcode) { return opcode + type; };
  define<T(T, T)>(of("add."), plus);
  define<T(T, T)>(of("sub."), minus);
  define<T(T, T)>(of("mul."), times);
  define<T(T, T, T)>(of("fma.rn."), fused);
  define<T(T, T)>(of("div.rn."), over);
  define<T(T)>(of("rcp.rn."), inverse);
  define<T(T)>(of("abs."), magnitude);
  define<T(T)>(of("neg."), negative);
  define<T(T, T)>(of("max."), larger);
  define<T(T, T)>(of("copysign."), with_sign);
}

}  // namespace

void define_arithmetic() {
  define_integers();
  define_floats<float>("f32");
  define_floats<double>("f64");
  define<double(double, double)>("add.rn.f64", plus);
  define<double(double)>("sqrt.rn.f64", [](double a) { return std::sqrt(a); });
  define<float(float, float, float)>("fma.rm.f32", [](float a, float b, float c) {
    return fused_towards_minus_infinity(a, b, c);
  });
}

}  // namespace ptx
