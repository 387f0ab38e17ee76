// Bits: logic, shifts, moves, selections, packing.
#include <bit>

#include "forms.h"

namespace ptx {
namespace {

constexpr auto both = [](auto a, auto b) { return a & b; };
constexpr auto either = [](auto a, auto b) { return a | b; };
constexpr auto one_only = [](auto a, auto b) { return a ^ b; };
constexpr auto inverted = [](auto a) { return ~a; };

// Shifts by the width or more leave zeros, or copies of the sign.
constexpr auto left = [](auto a, uint32_t by) { return by < 8 * sizeof(a) ? a << by : 0; };
constexpr auto right = [](auto a, uint32_t by) {
  constexpr uint32_t kBits = 8 * sizeof(a);
  if constexpr (std::is_signed_v<decltype(a)>)
    return a >> (by < kBits ? by : kBits - 1);
  else
    return by < kBits ? a >> by : 0;
};

// What is not chosen may be undefined.
template <typename T>
void select(Warp& warp, const Instruction& at, uint32_t lanes) {
  LaneWise<decltype([](T a, T b, Pred which) { return which ? a : b; }), T, T, T, Pred>::execute(
      warp, at, lanes);
  uint32_t first = 0;
  for_lanes(lanes,
            [&](int lane) { first |= uint32_t(warp.lanes<Pred>(at.operand[3])[lane]) << lane; });
  warp.set_undefined(at.operand[0], lanes,
                     (warp.undefined(at.operand[1]) & first) |
                         (warp.undefined(at.operand[2]) & ~first) | warp.undefined(at.operand[3]));
}

template <typename T>
void define_moves(std::initializer_list<const char*> types) {
  for (const std::string type : types) define<T(T)>("mov." + type, [](T a) { return a; });
}
template <typename T>
void define_selections(std::initializer_list<const char*> types) {
  for (const std::string type : types)
    define({"selp." + type, {sizeof(T), sizeof(T), sizeof(T), sizeof(Pred)}, 1, select<T>});
}

// mov.b64 whole, {first, second, ...} and back: the first part is the lowest.
template <typename Whole, typename Part>
struct Packing {
  static constexpr int kParts = sizeof(Whole) / sizeof(Part);
  static void pack(Warp& warp, const Instruction& at, uint32_t lanes) {
    uint32_t undefined = 0;
    for (int i = 0; i < kParts; ++i) undefined |= warp.undefined(at.operand[1 + i]);
    warp.set_undefined(at.operand[0], lanes, undefined);
    for_lanes(lanes, [&](int lane) {
      Whole whole = 0;
      for (int i = 0; i < kParts; ++i)
        whole |= Whole(warp.lanes<Part>(at.operand[1 + i])[lane]) << 8 * sizeof(Part) * i;
      warp.lanes<Whole>(at.operand[0])[lane] = whole;
    });
  }
  static void unpack(Warp& warp, const Instruction& at, uint32_t lanes) {
    for (int i = 0; i < kParts; ++i)
      warp.set_undefined(at.operand[i], lanes, warp.undefined(at.operand[kParts]));
    for_lanes(lanes, [&](int lane) {
      const Whole whole = warp.lanes<Whole>(at.operand[kParts])[lane];
      for (int i = 0; i < kParts; ++i)
        warp.lanes<Part>(at.operand[i])[lane] = static_cast<Part>(whole >> 8 * sizeof(Part) * i);
    });
  }
  static void define_both(const std::string& type) {
    std::vector<int> packed(1 + kParts, sizeof(Part)), unpacked(1 + kParts, sizeof(Part));
    packed.front() = unpacked.back() = sizeof(Whole);
    define({"mov." + type + ".pack", packed, 1, pack});
    define({"mov." + type + ".unpack", unpacked, kParts, unpack});
  }
};

}  // namespace

void define_bits() {
  define<Pred(Pred, Pred)>("and.pred", both);
  define<Pred(Pred, Pred)>("or.pred", either);
  define<Pred(Pred)>("not.pred", [](Pred a) { return !a; });
  define<uint32_t(uint32_t, uint32_t)>("and.b32", both);
  define<uint32_t(uint32_t, uint32_t)>("or.b32", either);
  define<uint32_t(uint32_t, uint32_t)>("xor.b32", one_only);
  define<uint32_t(uint32_t)>("not.b32", inverted);
  define<uint64_t(uint64_t, uint64_t)>("and.b64", both);
  define<uint64_t(uint64_t, uint64_t)>("or.b64", either);
  define<uint64_t(uint64_t, uint64_t)>("xor.b64", one_only);
  define<uint64_t(uint64_t)>("not.b64", inverted);
  define<uint32_t(uint32_t, uint32_t)>("shl.b32", left);
  define<uint64_t(uint64_t, uint32_t)>("shl.b64", left);
  define<uint32_t(uint32_t, uint32_t)>("shr.u32", right);
  define<uint64_t(uint64_t, uint32_t)>("shr.u64", right);
  define<int32_t(int32_t, uint32_t)>("shr.s32", right);
  define<int64_t(int64_t, uint32_t)>("shr.s64", right);
  define<uint32_t(uint32_t)>("popc.b32", [](uint32_t a) { return std::popcount(a); });
  define_moves<Pred>({"pred"});
  define_moves<uint16_t>({"u16"});
  define_moves<uint32_t>({"u32", "b32", "f32"});
  define_moves<uint64_t>({"u64", "b64", "f64"});
  define_selections<uint16_t>({"u16"});
  define_selections<uint32_t>({"u32", "b32", "f32"});
  define_selections<uint64_t>({"b64", "f64"});
  Packing<uint32_t, uint16_t>::define_both("b32");
  Packing<uint64_t, uint32_t>::define_both("b64");
}

}  // namespace ptx
