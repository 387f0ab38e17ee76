// Loads, stores and atomic operations.
#include <cstring>

#include "accesses.h"

namespace ptx {
namespace {

// N elements of type T, each in a register of type R.
template <Space kSpace, typename T, typename R, int N>
struct Transfer {
  using Address = std::conditional_t<kSpace == Space::kShared, uint32_t, uint64_t>;

  static void load(Warp& warp, const Instruction& at, uint32_t lanes) {
    const Access all = access_at<Address>(warp, at, N, lanes, N * sizeof(T), Touch::kRead);
    const uint32_t unwritten = for_places<kSpace>(warp, at, all, [&](int lane, const char* place) {
      T values[N];
      memcpy(values, place, sizeof(values));
      for (int i = 0; i < N; ++i) warp.lanes<R>(at.operand[i])[lane] = static_cast<R>(values[i]);
    });
    for (int i = 0; i < N; ++i) warp.set_undefined(at.operand[i], lanes, unwritten);
    if (unwritten != 0) warp.remember_unwritten(at);
  }
  static void store(Warp& warp, const Instruction& at, uint32_t lanes) {
    const Access all = access_at<Address>(warp, at, 0, lanes, N * sizeof(T), Touch::kWrite);
    for (int i = 0; i < N; ++i) warp.refuse_undefined(at.operand[2 + i], lanes, "what is stored");
    for_places<kSpace>(warp, at, all, [&](int lane, char* place) {
      T values[N];
      for (int i = 0; i < N; ++i)
        values[i] = static_cast<T>(warp.lanes<const R>(at.operand[2 + i])[lane]);
      memcpy(place, values, sizeof(values));
    });
  }
};

// name: "global.v4.f32"
template <Space kSpace, typename T, int N = 1, typename R = T>
void define_load(const char* name) {
  using Load = Transfer<kSpace, T, R, N>;
  std::vector<int> widths(N, sizeof(R));
  widths.insert(widths.end(), {sizeof(typename Load::Address), kDisplacement});
  define({std::string("ld.") + name, widths, N, Load::load});
}
template <Space kSpace, typename T, int N = 1, typename R = T>
void define_store(const char* name) {
  using Store = Transfer<kSpace, T, R, N>;
  std::vector<int> widths{sizeof(typename Store::Address), kDisplacement};
  widths.insert(widths.end(), N, sizeof(R));
  define({std::string("st.") + name, widths, 0, Store::store});
}
template <Space kSpace, typename T, int N = 1, typename R = T>
void define_both(const char* name) {
  define_load<kSpace, T, N, R>(name);
  define_store<kSpace, T, N, R>(name);
}

// Parameters of the kernel: the same for all lanes.
template <typename T, typename R, int N>
void load_parameter(Warp& warp, const Instruction& at, uint32_t lanes) {
  const std::vector<char>& parameters = warp.block.launch.parameters;
  const Access all = access_at<uint64_t>(warp, at, N, lanes, N * sizeof(T), Touch::kRead);
  for (int i = 0; i < N; ++i) warp.set_undefined(at.operand[i], lanes, 0);
  for_lanes(lanes, [&](int lane) {
    const uint64_t address = all.address[lane];
    if (address % all.bytes != 0 || address + all.bytes > parameters.size())
      throw Fault{"reads outside of the kernel's parameters, or misaligned", lane};
    for (int i = 0; i < N; ++i) {
      T value;
      memcpy(&value, parameters.data() + address + i * sizeof(T), sizeof(T));
      warp.lanes<R>(at.operand[i])[lane] = static_cast<R>(value);
    }
  });
}

template <typename T, typename R = T, int N = 1>
void define_parameter(const char* name) {
  std::vector<int> widths(N, sizeof(R));
  widths.insert(widths.end(), {kDisplacement, kDisplacement});
  define({std::string("ld.param.") + name, widths, N, load_parameter<T, R, N>});
}

// old = [address]; [address] += value
template <typename T>
void add_atomically(Warp& warp, const Instruction& at, uint32_t lanes) {
  const Access all = access_at<uint64_t>(warp, at, 1, lanes, sizeof(T), Touch::kAtomic);
  warp.refuse_undefined(at.operand[3], lanes, "what is added");
  warp.set_undefined(at.operand[0], lanes, 0);
  for_places<Space::kGlobal>(warp, at, all, [&](int lane, char* place) {
    T before;
    memcpy(&before, place, sizeof(T));
    const T after = before + warp.lanes<T>(at.operand[3])[lane];
    memcpy(place, &after, sizeof(T));
    warp.lanes<T>(at.operand[0])[lane] = before;
  });
}

template <typename T>
void define_atomic(const char* name) {
  define({name, {sizeof(T), kDisplacement, kDisplacement, sizeof(T)}, 1, add_atomically<T>});
}

}  // namespace

void define_memory() {
  define_both<Space::kGlobal, uint8_t, 1, uint16_t>("global.u8");
  define_both<Space::kGlobal, uint16_t>("global.u16");
  define_both<Space::kGlobal, uint16_t, 2>("global.v2.u16");
  define_both<Space::kGlobal, uint16_t, 4>("global.v4.u16");
  define_load<Space::kGlobal, int32_t, 1, int64_t>("global.s32");
  define_both<Space::kGlobal, uint32_t>("global.u32");
  define_both<Space::kGlobal, uint32_t, 4>("global.v4.u32");
  define_both<Space::kGlobal, uint64_t>("global.u64");
  define_both<Space::kGlobal, float>("global.f32");
  define_both<Space::kGlobal, float, 2>("global.v2.f32");
  define_both<Space::kGlobal, float, 4>("global.v4.f32");
  define_both<Space::kGlobal, double>("global.f64");
  define_both<Space::kGlobal, double, 2>("global.v2.f64");
  define_both<Space::kShared, uint8_t, 1, uint16_t>("shared.u8");
  define_store<Space::kShared, uint16_t>("shared.u16");
  define_both<Space::kShared, uint32_t>("shared.u32");
  define_load<Space::kShared, uint32_t, 2>("shared.v2.u32");
  define_both<Space::kShared, float>("shared.f32");
  define_load<Space::kShared, float, 4>("shared.v4.f32");
  define_both<Space::kShared, double>("shared.f64");
  define_parameter<uint8_t, uint16_t>("u8");
  define_parameter<uint32_t>("u32");
  define_parameter<uint32_t, uint32_t, 2>("v2.u32");
  define_parameter<uint64_t>("u64");
  define_parameter<float>("f32");
  define_parameter<double>("f64");
  define_atomic<uint32_t>("atom.global.add.u32");
  define_atomic<float>("atom.global.add.f32");
}

}  // namespace ptx
