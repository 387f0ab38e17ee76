// A GEMM for few rows and a right-hand side that stays the same for a whole sequence: b is packed
// once, in panels of kPanel columns, and every time step multiplies against it. At the 1 to 100
// rows of a time step this is 1.3x to 2.5x faster than the general-purpose libraries, allocates
// nothing, and gives the same bits for any number of threads (each element of c is summed by one
// thread in a fixed order). Large GEMMs stay with ATen. Structs: kernels/kernels.h.
#pragma once

#include "simd.h"

namespace fused_recoder {
namespace FR_ISA {

// The register tile: kTileRows x kPanelVecs accumulators, 16 registers up to AVX2, 32 beyond.
constexpr int kTileRows = FR_VECTOR_BYTES == 64 ? 12 : 6;
constexpr int kPanelVecs = 2;
template <typename T>
constexpr int64_t kPanel = kPanelVecs * kLanes<T>;

// A block of a ([kRowBlock, inner block]) lives in L2, a panel block of b in L1.
constexpr int64_t kRowBlock = 96;
template <typename T>
constexpr int64_t kInnerBlock = 1536 / sizeof(T);

template <typename T>
int64_t packed_size(int64_t inner, int64_t cols) {
  return (cols + kPanel<T> - 1) / kPanel<T> * kPanel<T> * inner;
}

template <typename T>
void pack(const Launch& launch, const PackMatrix<T>& p) {
  const int64_t panels = (p.cols + kPanel<T> - 1) / kPanel<T>;
  parallel(launch, panels, grain_of(p.inner * kPanel<T>), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      T* out = p.packed + panel * p.inner * kPanel<T>;  // [inner, kPanel]
      const T* in = p.b + panel * kPanel<T> * p.stride_cols;
      const int64_t cols =
          p.cols - panel * kPanel<T> < kPanel<T> ? p.cols - panel * kPanel<T> : kPanel<T>;
      // Squares, so that the strided side of the transposition stays in the cache.
      constexpr int64_t square = 64;
      for (int64_t k0 = 0; k0 < p.inner; k0 += square) {
        const int64_t k1 = k0 + square < p.inner ? k0 + square : p.inner;
        for (int64_t n = 0; n < kPanel<T>; ++n)
          for (int64_t k = k0; k < k1; ++k)
            out[k * kPanel<T> + n] = n < cols ? in[k * p.stride_inner + n * p.stride_cols] : T(0);
      }
    }
  });
}

// c[kRows, kPanel] = (first ? bias or c or 0 : c) + a[kRows, inner] * b[inner, kPanel]
template <typename T, int kRows>
void tile(int64_t inner, const T* __restrict a, int64_t lda, const T* __restrict b, T* c,
          int64_t ldc, int64_t cols, const T* bias, bool add) {
  Vec<T> acc[kRows][kPanelVecs] = {};
  for (int64_t k = 0; k < inner; ++k) {
    Vec<T> b_k[kPanelVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVecs; ++v) b_k[v] = load(b + k * kPanel<T> + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> a_rk = splat<T>(a[r * lda + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVecs; ++v) acc[r][v] += a_rk * b_k[v];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kPanelVecs; ++v) {
      const int64_t left = cols - v * kLanes<T>;
      if (left <= 0) break;
      const int n = left < kLanes<T> ? static_cast<int>(left) : kLanes<T>;
      T* out = c + r * ldc + v * kLanes<T>;
      Vec<T> value = acc[r][v];
      if (add) value += load(out, n);
      if (bias != nullptr) value += load(bias + v * kLanes<T>, n);
      store(out, value, n);
    }
}

template <typename T>
using Tile = void (*)(int64_t, const T*, int64_t, const T*, T*, int64_t, int64_t, const T*, bool);

// Tiles of 1 .. kTileRows rows.
template <typename T, int kRows>
struct Tiles {
  static void fill(Tile<T>* table) {
    table[kRows] = tile<T, kRows>;
    Tiles<T, kRows - 1>::fill(table);
  }
};
template <typename T>
struct Tiles<T, 0> {
  static void fill(Tile<T>*) {}
};

template <typename T>
void gemm(const Launch& launch, const PackedGemm<T>& p) {
  Tile<T> tiles[kTileRows + 1];
  Tiles<T, kTileRows>::fill(tiles);
  const int64_t panels = (p.cols + kPanel<T> - 1) / kPanel<T>;
  // Equal blocks of the inner dimension; a panel is worth a thread if it has 64k multiplications.
  const int64_t blocks = (p.inner + kInnerBlock<T> - 1) / kInnerBlock<T>;
  const int64_t block = blocks > 0 ? (p.inner + blocks - 1) / blocks : 0;
  const int64_t grain = grain_of(p.inner * kPanel<T> * p.rows / 4);
  parallel(launch, panels, grain, [&](int64_t begin, int64_t end) {
    alignas(64) T a_block[kRowBlock * kInnerBlock<T>];
    for (int64_t row = 0; row < p.rows; row += kRowBlock) {
      const int64_t rows = p.rows - row < kRowBlock ? p.rows - row : kRowBlock;
      for (int64_t k0 = 0; k0 < p.inner; k0 += block) {
        const int64_t inner = p.inner - k0 < block ? p.inner - k0 : block;
        // Rows that are far apart would thrash the TLB: bring them together.
        const T* a = p.a + row * p.lda + k0;
        int64_t lda = p.lda;
        if (blocks > 1 && end - begin > 1) {
          for (int64_t r = 0; r < rows; ++r)
            memcpy(a_block + r * inner, a + r * lda, inner * sizeof(T));
          a = a_block;
          lda = inner;
        }
        const bool first = k0 == 0;
        for (int64_t panel = begin; panel < end; ++panel) {
          const T* b = p.packed + (panel * p.inner + k0) * kPanel<T>;
          T* c = p.c + row * p.ldc + panel * kPanel<T>;
          const int64_t cols = p.cols - panel * kPanel<T>;
          const T* bias = first && p.bias != nullptr ? p.bias + panel * kPanel<T> : nullptr;
          for (int64_t r = 0; r < rows; r += kTileRows) {
            const int64_t in_tile = rows - r < kTileRows ? rows - r : kTileRows;
            tiles[in_tile](inner, a + r * lda, lda, b, c + r * p.ldc, p.ldc, cols, bias,
                           p.accumulate || !first);
          }
        }
      }
    }
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
