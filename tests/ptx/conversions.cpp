// cvt and cvta.
#include <cmath>

#include "forms.h"
#include "rounding.h"

namespace ptx {
namespace {

template <typename To, typename From>
void define_plain(const std::string& name) {
  define<To(From)>(name, [](From a) { return static_cast<To>(a); });
}

}  // namespace

void define_conversions() {
  define_plain<double, float>("cvt.f64.f32");
  define_plain<float, double>("cvt.rn.f32.f64");
  define_plain<float, int32_t>("cvt.rn.f32.s32");
  define_plain<double, int64_t>("cvt.rn.f64.s64");
  define_plain<int64_t, int32_t>("cvt.s64.s32");
  // Of a wider register the lowest bits count.
  define<int64_t(uint64_t)>("cvt.s64.s32", [](uint64_t a) { return static_cast<int32_t>(a); });
  define<int32_t(uint32_t)>("cvt.s32.s8", [](uint32_t a) { return static_cast<int8_t>(a); });
  define_plain<uint16_t, uint64_t>("cvt.u16.u64");
  define_plain<uint32_t, uint16_t>("cvt.u32.u16");
  define_plain<uint32_t, uint64_t>("cvt.u32.u64");
  define_plain<uint64_t, uint32_t>("cvt.u64.u32");
  define<float(float)>("cvt.sat.f32.f32", [](float a) {
    return a > 1 ? 1.0f : a > 0 ? a : 0.0f;  // NaN: 0
  });
  define<float(float)>("cvt.rni.f32.f32", [](float a) { return std::nearbyint(a); });
  define<uint16_t(float)>("cvt.rn.f16.f32", [](float a) { return to_half(a); });
  define<uint16_t(float)>("cvt.rn.bf16.f32", [](float a) { return to_bfloat16(a); });
  define<float(uint16_t)>("cvt.f32.f16", [](uint16_t a) { return from_half(a); });
  // Among all addresses, global ones stand for themselves.
  define_plain<uint64_t, uint64_t>("cvta.global.u64");
  define_plain<uint64_t, uint64_t>("cvta.to.global.u64");
}

}  // namespace ptx
