// setp: comparisons into predicates. Those of floating-point numbers are false for NaN, unless
// their name ends in u.
#include <cmath>

#include "forms.h"

namespace ptx {
namespace {

constexpr auto eq = [](auto a, auto b) { return a == b; };
constexpr auto ne = [](auto a, auto b) { return a != b; };
constexpr auto lt = [](auto a, auto b) { return a < b; };
constexpr auto le = [](auto a, auto b) { return a <= b; };
constexpr auto gt = [](auto a, auto b) { return a > b; };
constexpr auto ge = [](auto a, auto b) { return a >= b; };

constexpr auto ltu = [](auto a, auto b) { return !(a >= b); };
constexpr auto leu = [](auto a, auto b) { return !(a > b); };
constexpr auto gtu = [](auto a, auto b) { return !(a <= b); };
constexpr auto geu = [](auto a, auto b) { return !(a < b); };
constexpr auto num = [](auto a, auto b) { return !std::isnan(a) && !std::isnan(b); };

}  // namespace

void define_comparisons() {
  define<Pred(uint32_t, uint32_t)>("setp.eq.b32", eq);
  define<Pred(int16_t, int16_t)>("setp.eq.s16", eq);
  define<Pred(int16_t, int16_t)>("setp.ne.s16", ne);
  define<Pred(int32_t, int32_t)>("setp.eq.s32", eq);
  define<Pred(int32_t, int32_t)>("setp.ne.s32", ne);
  define<Pred(int32_t, int32_t)>("setp.lt.s32", lt);
  define<Pred(int32_t, int32_t)>("setp.le.s32", le);
  define<Pred(int32_t, int32_t)>("setp.gt.s32", gt);
  define<Pred(int32_t, int32_t)>("setp.ge.s32", ge);
  define<Pred(uint32_t, uint32_t)>("setp.lt.u32", lt);
  define<Pred(uint32_t, uint32_t)>("setp.gt.u32", gt);
  define<Pred(uint32_t, uint32_t)>("setp.ge.u32", ge);
  define<Pred(int64_t, int64_t)>("setp.eq.s64", eq);
  define<Pred(int64_t, int64_t)>("setp.ne.s64", ne);
  define<Pred(int64_t, int64_t)>("setp.lt.s64", lt);
  define<Pred(int64_t, int64_t)>("setp.gt.s64", gt);
  define<Pred(int64_t, int64_t)>("setp.ge.s64", ge);
  define<Pred(uint64_t, uint64_t)>("setp.lt.u64", lt);
  define<Pred(float, float)>("setp.eq.f32", eq);
  define<Pred(float, float)>("setp.lt.f32", lt);
  define<Pred(float, float)>("setp.gt.f32", gt);
  define<Pred(float, float)>("setp.ge.f32", ge);
  define<Pred(float, float)>("setp.ltu.f32", ltu);
  define<Pred(float, float)>("setp.leu.f32", leu);
  define<Pred(float, float)>("setp.geu.f32", geu);
  define<Pred(float, float)>("setp.num.f32", num);
  define<Pred(double, double)>("setp.eq.f64", eq);
  define<Pred(double, double)>("setp.neu.f64", ne);
  define<Pred(double, double)>("setp.lt.f64", lt);
  define<Pred(double, double)>("setp.gt.f64", gt);
  define<Pred(double, double)>("setp.ge.f64", ge);
  define<Pred(double, double)>("setp.ltu.f64", ltu);
  define<Pred(double, double)>("setp.gtu.f64", gtu);
  define<Pred(double, double)>("setp.num.f64", num);
}

}  // namespace ptx
