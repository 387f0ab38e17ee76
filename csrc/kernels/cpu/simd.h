// Vectors of FR_VECTOR_BYTES bytes and the elementary functions on them. Written with the
// compiler's vector types, so that one source serves SSE2, AVX2 and AVX-512.
// Everything lives in the namespace of its instruction set (FR_ISA): two objects compiled with
// different flags never share an inline function.
#pragma once

#include <stdint.h>
#include <string.h>
#if FR_VECTOR_BYTES >= 32
#include <immintrin.h>
#endif

#include "../kernels.h"

#define FR_INLINE inline __attribute__((always_inline))

namespace fused_recoder {
namespace FR_ISA {

template <typename T>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vec __attribute__((vector_size(FR_VECTOR_BYTES)));
  typedef int32_t Int __attribute__((vector_size(FR_VECTOR_BYTES)));
  static constexpr int kMantissa = 23, kBias = 127, kTerms = 8, kLogTerms = 5;
  static constexpr float kMin = -87.33f, kMax = 88.37f, kSmallest = 1.17549435e-38f;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
};

template <>
struct Simd<double> {
  typedef double Vec __attribute__((vector_size(FR_VECTOR_BYTES)));
  typedef int64_t Int __attribute__((vector_size(FR_VECTOR_BYTES)));
  static constexpr int kMantissa = 52, kBias = 1023, kTerms = 14, kLogTerms = 11;
  static constexpr double kMin = -708.39, kMax = 709.43, kSmallest = 2.2250738585072014e-308;
  static constexpr double kLn2High = 6.93145751953125e-1, kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
};

template <typename T>
using Vec = typename Simd<T>::Vec;
template <typename T>
constexpr int kLanes = FR_VECTOR_BYTES / sizeof(T);

template <typename T>
FR_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <typename T>
FR_INLINE void store(T* p, Vec<T> v) {
  memcpy(p, &v, sizeof v);
}

// The first n lanes; the others are `fill`.
template <typename T>
FR_INLINE Vec<T> load(const T* p, int n, T fill = T(0)) {
  if (n == kLanes<T>) return load(p);
#if FR_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return _mm512_mask_loadu_ps(_mm512_set1_ps(fill), (1u << n) - 1, p);
  if constexpr (sizeof(T) == 8) return _mm512_mask_loadu_pd(_mm512_set1_pd(fill), (1u << n) - 1, p);
#elif FR_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(p, mask), (__m256)mask);
  }
#endif
  T lanes[kLanes<T>];
  for (int i = 0; i < kLanes<T>; ++i) lanes[i] = i < n ? p[i] : fill;
  return load(lanes);
}

template <typename T>
FR_INLINE void store(T* p, Vec<T> v, int n) {
  if (n == kLanes<T>) return store(p, v);
#if FR_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, (1u << n) - 1, v);
  if constexpr (sizeof(T) == 8) return _mm512_mask_storeu_pd(p, (1u << n) - 1, v);
#endif
  T lanes[kLanes<T>];
  store(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

template <typename T>
FR_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // one broadcast; x + 0 would really be added, for the sake of -0
}

// The value in a register: the compiler would rather load it again wherever it is used.
template <typename T>
FR_INLINE Vec<T> in_register(Vec<T> v) {
#ifdef __x86_64__
  asm("" : "+v"(v));
#endif
  return v;
}

template <typename T>
FR_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

template <typename T>
FR_INLINE Vec<T> min(Vec<T> a, Vec<T> b) {
  return a < b ? a : b;
}

template <typename T>
FR_INLINE T sum(Vec<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  for (int width = kLanes<T> / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

template <typename T>
FR_INLINE T largest(Vec<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  T best = lanes[0];
  for (int i = 1; i < kLanes<T>; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// e^x = 2^n * e^r with |r| <= ln(2)/2; `minus_one` is e^r - 1, `power` is 2^n.
template <typename T>
struct ReducedExp {
  Vec<T> minus_one, power;
};

template <typename T>
FR_INLINE ReducedExp<T> reduced_exp(Vec<T> x) {
  using C = Simd<T>;
  // NaN fails both comparisons and stays NaN.
  x = x < C::kMin ? splat<T>(C::kMin) : x;
  x = x > C::kMax ? splat<T>(C::kMax) : x;
  const Vec<T> shifted = x * T(1.4426950408889634074) + C::kRound;
  const Vec<T> n = shifted - C::kRound;
  const Vec<T> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  // Taylor series of e^r - 1 = r (1 + r/2 (1 + r/3 (...))): the remainder is below half an ulp.
  Vec<T> series = splat<T>(T(1));
  for (int k = C::kTerms; k > 1; --k) series = T(1) + series * r * T(1.0 / k);
  const typename C::Int exponent = __builtin_convertvector(n, typename C::Int) + C::kBias;
  return {series * r, (Vec<T>)(exponent << C::kMantissa)};
}

template <typename T>
FR_INLINE Vec<T> exp(Vec<T> x) {
  const ReducedExp<T> e = reduced_exp<T>(x);
  const Vec<T> y = e.minus_one * e.power + e.power;
  return x < Simd<T>::kMin ? Vec<T>{} : y;
}

template <typename T>
FR_INLINE Vec<T> expm1(Vec<T> x) {
  const ReducedExp<T> e = reduced_exp<T>(x);
  return e.minus_one * e.power + (e.power - T(1));
}

// log of a positive, normal x = 2^n * m with m in [sqrt(1/2), sqrt(2)):
// log m = 2 artanh(s) = 2 (s + s^3/3 + ...) with s = (m - 1) / (m + 1), |s| < 0.172.
template <typename T>
FR_INLINE Vec<T> log(Vec<T> x) {
  using C = Simd<T>;
  using Int = typename C::Int;
  const Int bits = (Int)x;
  // Halves of the mantissa's range above sqrt(2) belong to the next power of two.
  const Int half = (Int)(splat<T>(T(0.70710678118654752440)));
  const Int n = (bits - half) >> C::kMantissa;
  const Vec<T> m = (Vec<T>)(bits - (n << C::kMantissa));
  const Vec<T> s = (m - T(1)) / (m + T(1));
  const Vec<T> square = s * s;
  Vec<T> series = splat<T>(T(1.0 / (2 * C::kLogTerms + 1)));
  for (int k = C::kLogTerms - 1; k >= 0; --k) series = series * square + T(1.0 / (2 * k + 1));
  const Vec<T> power = __builtin_convertvector(n, Vec<T>);
  return power * C::kLn2High + (T(2) * s * series + power * C::kLn2Low);
}

template <typename T>
FR_INLINE Vec<T> sigmoid(Vec<T> x) {
  return T(1) / (T(1) + exp<T>(-x));
}

template <typename T>
FR_INLINE Vec<T> tanh(Vec<T> x) {
  // tanh is 1 to the last bit long before the exponential overflows.
  const Vec<T> clamped = max<T>(min<T>(x, splat<T>(T(20))), splat<T>(T(-20)));
  const Vec<T> e = expm1<T>(x == x ? clamped * T(2) : x);
  return e / (e + T(2));
}

// Calls body(j, n) for all vectors of `count` elements; n lanes of them are real. The full vectors
// come with a constant n, so that the partial loads and stores vanish from the main loop.
template <typename T, typename Body>
FR_INLINE void for_each_vector(int64_t count, const Body& body) {
  constexpr int lanes = kLanes<T>;
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) body(j, lanes);
  if (j < count) body(j, static_cast<int>(count - j));
}

// Runs body(begin, end) over `count` rows in parallel.
template <typename Body>
FR_INLINE void parallel(const Launch& launch, int64_t count, int64_t grain, const Body& body) {
  launch.parallel_for(
      count, grain,
      [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      &body);
}

// Rows worth a thread of their own: about 16k elements each.
FR_INLINE int64_t grain_of(int64_t row_elements) {
  return row_elements > 16384 ? 1 : 16384 / (row_elements > 0 ? row_elements : 1);
}

// The dropout factors of units j .. j + lanes - 1 of a row; all 1 without dropout.
template <typename T>
FR_INLINE Vec<T> dropout_factor(const Dropout& d, uint32_t time, uint32_t row, int64_t j,
                                uint32_t sample = 0) {
  if (d.seed == nullptr) return splat<T>(T(1));
  constexpr int lanes = kLanes<T>;
  constexpr int quads = lanes >= 4 ? lanes / 4 : 1;
  T factor[quads * 4];
  for (int q = 0; q < quads; ++q)
    dropout_quad<T>(d, time, sample, row, static_cast<uint32_t>(j / 4 + q), factor + 4 * q);
  return load(factor + (lanes >= 4 ? 0 : j % 4));
}

}  // namespace FR_ISA
}  // namespace fused_recoder
