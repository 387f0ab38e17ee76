// What products multiply, in units of kDepth neighbours along the inner dimension: a unit of a
// times a unit of b is one step. Numbers of the accumulation type are their own units, and so are
// numbers that were rounded and widened again. Pairs of bfloat16 are multiplied and added at once
// where the CPU can (AVX512_BF16) and are widened on the way elsewhere, to the same bits: a product
// of two of them is exact in float, so that adding it rounds once either way. (AVX512_BF16 takes
// numbers below 2^-126 for zero.)
#pragma once

#include "simd.h"

namespace fused_recoder {
namespace FR_ISA {

// Names of precisions; numbers of them exist as units only.
struct BFloat16 {};
struct BFloat16Pairs {};
struct Half {};

// Every second lane of two vectors.
FR_INLINE Vec<float> even_lanes(Vec<float> a, Vec<float> b) {
#if FR_VECTOR_BYTES == 64
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif FR_VECTOR_BYTES == 32
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
}
FR_INLINE Vec<float> odd_lanes(Vec<float> a, Vec<float> b) {
#if FR_VECTOR_BYTES == 64
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif FR_VECTOR_BYTES == 32
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

template <typename S>
struct Operand {
  using A = S;
  using Unit = S;
  using Units = Vec<S>;
  static constexpr int64_t kDepth = 1;
  static constexpr bool kRounds = false;

  static FR_INLINE Units load_units(const Unit* p) { return load(p); }
  static FR_INLINE Units splat_unit(Unit u) { return splat<S>(u); }
  static FR_INLINE Vec<A> multiply_add(Units a, Units b, Vec<A> sum) { return sum + a * b; }
  static FR_INLINE Units rounded(Vec<A> x) { return x; }
};

// Bits of numbers rounded to bfloat16, in the high halves (the low ones are to be dropped): to the
// nearest, ties to even; NaN stays NaN.
FR_INLINE Simd<float>::Int rounded_bits(Vec<float> x) {
  using Int = Simd<float>::Int;
  const Int bits = (Int)x, odd = bits >> 16 & 1;
  return x == x ? bits + 0x7fff + odd : bits | 0x400000;
}

template <>
struct Operand<BFloat16Pairs> {
  using A = float;
  using Unit = uint32_t;  // the first of the pair in the low half
  using Units = typename Simd<float>::Int;
  static constexpr int64_t kDepth = 2;
  static constexpr bool kRounds = true;

  static FR_INLINE Units load_units(const Unit* p) {
    Units units;
    memcpy(&units, p, sizeof units);
    return units;
  }
  static FR_INLINE Units splat_unit(Unit u) { return int32_t(u) - Units{}; }
  static FR_INLINE Vec<float> multiply_add(Units a, Units b, Vec<float> sum) {
#ifdef FR_HAS_BFLOAT16
    return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const auto first = [](Units u) { return (Vec<float>)(u << 16); };
    const auto second = [](Units u) { return (Vec<float>)(u & int32_t(0xffff0000)); };
    sum += second(a) * second(b);
    sum += first(a) * first(b);
    return sum;
#endif
  }
  // Lane by lane.
  static FR_INLINE Units pair(Vec<float> first, Vec<float> second) {
    using Bits = uint32_t __attribute__((vector_size(FR_VECTOR_BYTES)));
    const Bits low = (Bits)rounded_bits(first) >> 16;
    const Bits high = (Bits)rounded_bits(second) & 0xffff0000;
    return (Units)(low | high);
  }
};

// Below AVX-512 widening pairs costs more than the memory that they save.
#if FR_VECTOR_BYTES == 64
template <>
struct Operand<BFloat16> : Operand<BFloat16Pairs> {};
#else
template <>
struct Operand<BFloat16> : Operand<float> {
  static constexpr bool kRounds = true;
  static FR_INLINE Units rounded(Vec<float> x) {
    return (Vec<float>)(rounded_bits(x) & int32_t(0xffff0000));
  }
};
#endif

template <>
struct Operand<Half> : Operand<float> {
  static constexpr bool kRounds = true;
  static FR_INLINE Units rounded(Vec<float> x) {
    float lanes[kLanes<float>];
    store(lanes, x);
    for (float& lane : lanes) lane = static_cast<float>(_Float16(lane));
    return load(lanes);
  }
};

// n lanes of units.
template <typename S>
FR_INLINE void store_units(typename Operand<S>::Unit* p, typename Operand<S>::Units units, int n) {
  static_assert(sizeof(typename Operand<S>::Unit) == sizeof(typename Operand<S>::A));
  store(reinterpret_cast<typename Operand<S>::A*>(p), (Vec<typename Operand<S>::A>)units, n);
}

// n lanes of units whose parts lie in rows of their own, `next` numbers apart (beyond `rows` of
// them they are 0), side by side in memory.
template <typename S>
FR_INLINE void round_across(const typename Operand<S>::A* rows, int64_t next, bool whole, int n,
                            typename Operand<S>::Unit* out) {
  using A = typename Operand<S>::A;
  if constexpr (Operand<S>::kDepth == 1)
    store_units<S>(out, Operand<S>::rounded(load(rows, n)), n);
  else
    store_units<S>(out, Operand<S>::pair(load(rows, n), whole ? load(rows + next, n) : Vec<A>{}),
                   n);
}

// A row of `inner` numbers side by side as units.
template <typename S>
FR_INLINE void round_along(const typename Operand<S>::A* row, int64_t inner,
                           typename Operand<S>::Unit* out) {
  using A = typename Operand<S>::A;
  if constexpr (Operand<S>::kDepth == 1) {
    for_each_vector<A>(inner, [&](int64_t j, int n) {
      store_units<S>(out + j, Operand<S>::rounded(load(row + j, n)), n);
    });
  } else {
    constexpr int64_t step = 2 * kLanes<A>;
    for (int64_t j = 0; j < inner; j += step) {
      const int64_t left = inner - j;
      const int low = left < kLanes<A> ? int(left) : kLanes<A>;
      const int high = left < step ? int(left) - low : kLanes<A>;
      const Vec<A> a = load(row + j, low), b = high > 0 ? load(row + j + low, high) : Vec<A>{};
      const int units = int((left < step ? left + 1 : step) / 2);
      store_units<S>(out + j / 2, Operand<S>::pair(even_lanes(a, b), odd_lanes(a, b)), units);
    }
  }
}

// Units along a row of `inner` numbers; the last one is filled up with 0.
template <typename S>
FR_INLINE int64_t units_of(int64_t inner) {
  return (inner + Operand<S>::kDepth - 1) / Operand<S>::kDepth;
}

}  // namespace FR_ISA
}  // namespace fused_recoder
