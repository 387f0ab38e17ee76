// ldmatrix and mma: what lane holds which element follows the figures of the PTX ISA ("Matrix
// fragments"). Lanes come in 8 groups of 4.
#include <cmath>
#include <cstring>

#include "accesses.h"
#include "approximate.h"
#include "rounding.h"

namespace ptx {
namespace {

int group_of(int lane) { return lane / 4; }
int within_group(int lane) { return lane % 4; }

// 8 x 8 elements of 16 bits each; lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
template <int kMatrices, bool kTransposed>
void load_matrices(Warp& warp, const Instruction& at, uint32_t) {
  constexpr uint32_t kRows = kMatrices == 4 ? kAllLanes : (1u << 8 * kMatrices) - 1;
  const Access rows = access_at<uint32_t>(warp, at, kMatrices, kRows, 16, Touch::kRead);
  warp.block.launch.counts.add_shared(rows);
  uint32_t unwritten[kMatrices] = {};
  for_each_lane(kRows, [&](int lane) {
    if (rows.address[lane] % 16 != 0) throw Fault{"the row starts at a misaligned address"};
  });
  for_each_lane(kAllLanes, [&](int lane) {
    for (int i = 0; i < 2 * kMatrices; ++i) {
      const int along = 2 * within_group(lane) + i % 2, across = group_of(lane);
      const int row = kTransposed ? along : across, column = kTransposed ? across : along;
      LaneAccess element = of_lane(warp, rows, lane);
      element.address = rows.address[8 * (i / 2) + row] + 2 * column;
      element.bytes = 2;
      uint16_t value;
      memcpy(&value, touch_shared(warp, element), sizeof(value));
      uint32_t& to = warp.lanes<uint32_t>(at.operand[i / 2])[lane];
      to = i % 2 == 0 ? value : to | uint32_t(value) << 16;
      unwritten[i / 2] |= uint32_t(!warp.block.shared.written(element)) << lane;
    }
  });
  for (int i = 0; i < kMatrices; ++i) {
    warp.set_undefined(at.operand[i], kAllLanes, unwritten[i]);
    if (unwritten[i] != 0) warp.remember_unwritten(at);
  }
}

struct Place {
  int along_m_or_n, along_k;
};

// Two elements share a register.
template <float (*kConvert)(uint16_t)>
struct Short {
  static constexpr int kPerRegister = 2;
  static float element(uint32_t bits, int i) {
    return kConvert(static_cast<uint16_t>(bits >> 16 * (i % 2)));
  }
  static Place of_a(int lane, int i) {
    return {group_of(lane) + 8 * (i / 2 % 2), 2 * within_group(lane) + i % 2 + 8 * (i / 4)};
  }
  static Place of_b(int lane, int i) {
    return {group_of(lane), 2 * within_group(lane) + i % 2 + 8 * (i / 2)};
  }
};

struct Tf32 {
  static constexpr int kPerRegister = 1;
  static float element(uint32_t bits, int) { return std::bit_cast<float>(bits & 0xffffe000u); }
  static Place of_a(int lane, int i) {
    return {group_of(lane) + 8 * (i % 2), within_group(lane) + 4 * (i / 2)};
  }
  static Place of_b(int lane, int i) { return {group_of(lane), within_group(lane) + 4 * i}; }
};

float towards_zero(double a) {
  const float nearest = static_cast<float>(a);
  return std::fabs(double(nearest)) > std::fabs(a) ? std::nextafter(nearest, 0.0f) : nearest;
}

// "The accumulation order, rounding and handling of subnormal inputs are unspecified", with "at
// least single precision": exact, or in single precision, truncating, from anywhere on.
template <int K>
float accumulate(float c, const double (&products)[K], uint64_t argument) {
  const double start = deviation(argument);
  if (start == 0) {
    double sum = c;
    for (double product : products) sum += product;
    return static_cast<float>(sum);
  }
  float sum = c;
  const int first = static_cast<int>((start + 1) * K / 2);
  for (int k = 0; k < K; ++k) sum = towards_zero(double(sum) + products[(first + k) % K]);
  return sum;
}

// d = a b + c: a [16,K], b [K,8], c and d [16,8].
template <int K, typename Type>
struct Multiply {
  static constexpr int kOfA = 16 * K / kLanes / Type::kPerRegister;
  static constexpr int kOfB = 8 * K / kLanes / Type::kPerRegister;
  static constexpr int kOfC = 4;  // registers of a lane; of d, too

  static void execute(Warp& warp, const Instruction& at, uint32_t) {
    float a[16][K], b[8][K];
    for (int i = kOfC; i < kOfC + kOfA + kOfB + kOfC; ++i)
      warp.refuse_undefined(at.operand[i], kAllLanes, "an operand of the product");
    gather<kOfA>(warp, at.operand + kOfC, Type::of_a, a);
    gather<kOfB>(warp, at.operand + kOfC + kOfA, Type::of_b, b);
    for (int i = 0; i < kOfC; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int row = group_of(lane) + 8 * (i / 2), column = 2 * within_group(lane) + i % 2;
        double products[K];
        for (int k = 0; k < K; ++k) products[k] = double(a[row][k]) * b[column][k];
        const float c = warp.lanes<float>(at.operand[kOfC + kOfA + kOfB + i])[lane];
        warp.lanes<float>(at.operand[i])[lane] =
            accumulate(c, products, std::bit_cast<uint32_t>(c) + 4 * lane + i);
      }
      warp.set_undefined(at.operand[i], kAllLanes, 0);
    }
  }

  static void define_as(const std::string& types) {
    define({"mma.sync.aligned.m16n8k" + std::to_string(K) + ".row.col." + types,
            std::vector<int>(kOfC + kOfA + kOfB + kOfC, 4), kOfC, execute, Kind::kWholeWarp});
  }

 private:
  template <int kRegisters, int kRows>
  static void gather(Warp& warp, const int32_t* operands, Place (*place_of)(int lane, int i),
                     float (&to)[kRows][K]) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < kRegisters * Type::kPerRegister; ++i) {
        const Place place = place_of(lane, i);
        const uint32_t bits = warp.lanes<uint32_t>(operands[i / Type::kPerRegister])[lane];
        to[place.along_m_or_n][place.along_k] = Type::element(bits, i);
      }
  }
};

template <int kMatrices, bool kTransposed>
void define_load(const std::string& name) {
  std::vector<int> widths(kMatrices, 4);
  widths.insert(widths.end(), {4, kDisplacement});
  define({"ldmatrix.sync.aligned.m8n8." + name + ".shared.b16", widths, kMatrices,
          load_matrices<kMatrices, kTransposed>, Kind::kWholeWarp});
}

}  // namespace

void define_matrices() {
  define_load<1, false>("x1");
  define_load<2, false>("x2");
  define_load<4, false>("x4");
  define_load<1, true>("x1.trans");
  define_load<2, true>("x2.trans");
  define_load<4, true>("x4.trans");
  Multiply<16, Short<from_half>>::define_as("f32.f16.f16.f32");
  Multiply<16, Short<from_bfloat16>>::define_as("f32.bf16.bf16.f32");
  Multiply<8, Short<from_half>>::define_as("f32.f16.f16.f32");
  Multiply<8, Short<from_bfloat16>>::define_as("f32.bf16.bf16.f32");
  Multiply<8, Tf32>::define_as("f32.tf32.tf32.f32");
  // To nearest, ties away from zero.
  define<uint32_t(float)>("cvt.rna.tf32.f32", [](float a) {
    const uint32_t bits = std::bit_cast<uint32_t>(a);
    return std::isfinite(a) ? (bits + 0x1000u) & 0xffffe000u : bits;
  });
}

}  // namespace ptx
