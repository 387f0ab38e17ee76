// Scalar mathematics shared by every backend: host and device, no torch, no allocation. That of
// signals: row_signals.h. Included by kernels/cpu/*.h, kernels/cuda/*.cuh and the tests of both.
#pragma once

#include <math.h>
#include <stdint.h>

#include "limits.h"

#ifdef __CUDACC__
#define FR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FR_HOST_DEVICE inline __attribute__((always_inline))
#endif
// On the host alone. Inlined always: what is compiled for several instruction sets must not be
// shared between them.
#define FR_HOST inline __attribute__((always_inline))

namespace fused_recoder {

// ---------------------------------------------------------------------------------------------
// Random bits. Philox4x32-10 (Salmon et al. 2011), a pure function of (key, counter), so that a
// mask is regenerated where it is needed, on any device and by any number of threads.

struct Philox {
  uint32_t word[4];
};

FR_HOST_DEVICE Philox philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0;
    const uint64_t p1 = uint64_t(0xCD9E8D57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c0 = n0;
    c1 = static_cast<uint32_t>(p1);
    c2 = n2;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Philox{{c0, c1, c2, c3}};
}

// One dropout mask of a sequence: which stream of the seed it is and how often it drops.
// Streams never overlap: the counter is (unit / 4, row, stream << kSampleBits | sample, time).
struct Dropout {
  const int64_t* seed;  // [1], null: no dropout
  uint32_t stream;
  uint32_t threshold;  // a unit is dropped if its 32 random bits are below this
  double scale;        // 1 / (1 - p)
};

enum DropoutStream : uint32_t {
  kOutputStream = 0,
  kLayerStream = 1,  // + layer
  kSampleStream = 2048,
  kInputStream = 2049,
  kSkipStream = 2050,
  kRecurrentStream = 3072  // + layer
};
static_assert(kRecurrentStream < kDropoutStreams);

FR_HOST_DEVICE Dropout make_dropout(const int64_t* seed, uint32_t stream, double p) {
  return Dropout{p > 0 ? seed : nullptr, stream, static_cast<uint32_t>(p * 4294967296.0),
                 1.0 / (1.0 - p)};
}

// The factor (0 or scale) of units 4 * quad .. 4 * quad + 3.
template <typename A>
FR_HOST_DEVICE void dropout_quad(const Dropout& d, uint32_t time, uint32_t sample, uint32_t row,
                                 uint32_t quad, A* factor) {
  const Philox bits =
      philox(static_cast<uint64_t>(*d.seed), quad, row, d.stream << kSampleBits | sample, time);
  for (int i = 0; i < 4; ++i) factor[i] = bits.word[i] < d.threshold ? A(0) : A(d.scale);
}

}  // namespace fused_recoder
