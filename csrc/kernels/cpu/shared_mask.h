// The decoder under K masks that the whole batch shares: one product with all of W, and for each
// sample one with the columns its mask drops (or one with those it keeps, if these are fewer).
// Structs: kernels/kernels.h.
#pragma once

#include "gemm.h"

namespace fused_recoder {
namespace FR_ISA {

// c[kRows, kPanel] = init + a * b[units, kPanel], with a [kRows, count] at row stride lda, init at
// row stride kPanel, and the rows of b that `units` lists.
template <typename T, int kRows>
void listed_tile(int64_t count, const int32_t* __restrict units, const T* __restrict a, int64_t lda,
                 const T* __restrict b, const T* init, T* c, int64_t ldc, int64_t cols) {
  Vec<T> acc[kRows][kPanelVecs];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kPanelVecs; ++v) acc[r][v] = load(init + r * kPanel<T> + v * kLanes<T>);
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; ++i) {
    const T* b_row = b + units[i] * kPanel<T>;
    Vec<T> b_i[kPanelVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVecs; ++v) b_i[v] = load(b_row + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> a_ri = splat<T>(a[r * lda + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVecs; ++v) acc[r][v] += a_ri * b_i[v];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kPanelVecs; ++v) {
      const int64_t left = cols - v * kLanes<T>;
      if (left <= 0) break;
      store(c + r * ldc + v * kLanes<T>, acc[r][v],
            left < kLanes<T> ? static_cast<int>(left) : kLanes<T>);
    }
}

template <typename T>
using ListedTile = void (*)(int64_t, const int32_t*, const T*, int64_t, const T*, const T*, T*,
                            int64_t, int64_t);

template <typename T, int kRows = kTileRows>
FR_INLINE void fill_listed_tiles(ListedTile<T>* table) {
  if constexpr (kRows > 0) {
    table[kRows] = listed_tile<T, kRows>;
    fill_listed_tiles<T, kRows - 1>(table);
  }
}

template <typename T>
void shared_decode(const Launch& launch, const SharedDecode<T>& p) {
  const int64_t K = p.samples, B = p.rows, H = p.hidden, V = p.vocab;
  const T scale = T(p.lists.scale);
  T* scaled = p.scratch;          // [B,H] scale * h
  T* listed = p.scratch + B * H;  // [K,B,H] its listed units side by side; minus those dropped
  const T sign = p.lists.dropped ? -scale : scale;
  parallel(launch, (K + 1) * B, grain_of(H), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* h = p.h + i % B * H;
      if (i < B) {
        for_each_vector<T>(
            H, [&](int64_t j, int n) { store(scaled + i * H + j, load(h + j, n) * scale, n); });
      } else {
        const int64_t k = i / B - 1;
        const int32_t* units = p.lists.units + k * H;
        T* out = listed + (i - B) * H;
        for (int32_t u = 0; u < p.lists.counts[k]; ++u) out[u] = sign * h[units[u]];
      }
    }
  });

  Tile<T> tiles[kTileRows + 1];
  ListedTile<T> listed_tiles[kTileRows + 1];
  fill_tiles<T>(tiles);
  fill_listed_tiles(listed_tiles);
  const int64_t panels = (V + kPanel<T> - 1) / kPanel<T>;
  const int64_t row_tiles = (B + kTileRows - 1) / kTileRows;
  const int64_t tile_rows = (B + row_tiles - 1) / row_tiles;
  // A panel of W, [H, kPanel], stays in the core's cache for all samples and rows.
  parallel(launch, panels, grain_of(H * kPanel<T> * B), [&](int64_t begin, int64_t end) {
    alignas(64) T base[kTileRows * kPanel<T>];
    for (int64_t panel = begin; panel < end; ++panel) {
      const T* b = static_cast<const T*>(p.packed) + panel * H * kPanel<T>;
      const T* next = panel + 1 < panels ? b + H * kPanel<T> : b;
      const int64_t cols = V - panel * kPanel<T>;
      for (int64_t r = 0; r < B; r += tile_rows) {
        const int64_t rows = B - r < tile_rows ? B - r : tile_rows;
        alignas(64) T bias[kPanel<T>] = {};
        if (p.bias != nullptr)
          for (int64_t n = 0; n < kPanel<T> && n < cols; ++n)
            bias[n] = p.bias[panel * kPanel<T> + n];
        if (p.lists.dropped)
          tiles[rows](H, scaled + r * H, H, b, next, base, kPanel<T>, kPanel<T>, bias, false);
        else
          for (int64_t i = 0; i < rows; ++i) memcpy(base + i * kPanel<T>, bias, sizeof bias);
        for (int64_t k = 0; k < K; ++k)
          listed_tiles[rows](p.lists.counts[k], p.lists.units + k * H, listed + (k * B + r) * H, H,
                             b, base, p.logits + (k * B + r) * V + panel * kPanel<T>, V, cols);
      }
    }
  });
}

// Rows of u and of W^T whose products a register tile sums, and how much of the vocabulary at once.
constexpr int kDotRows = 4, kDotUnits = 3;
template <typename T>
constexpr int64_t kDotBlock = 4096 / sizeof(T);

// dh[r, units[i]] += sign * <u[r, :], w[units[i], :]> over `size` tokens.
template <typename T, int kRows, int kUnits>
void dot_tile(int64_t size, const T* u, int64_t ldu, const T* w, int64_t ldw, const int32_t* units,
              T sign, T* dh, int64_t ldh) {
  const T* w_rows[kUnits];
  for (int i = 0; i < kUnits; ++i) w_rows[i] = w + units[i] * ldw;
  Vec<T> acc[kRows][kUnits] = {};
  for_each_vector<T>(size, [&](int64_t j, int n) {
    Vec<T> w_j[kUnits];
#pragma GCC unroll 4
    for (int i = 0; i < kUnits; ++i) w_j[i] = load(w_rows[i] + j, n);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> u_j = load(u + r * ldu + j, n);
#pragma GCC unroll 4
      for (int i = 0; i < kUnits; ++i) acc[r][i] += u_j * w_j[i];
    }
  });
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kUnits; ++i) dh[r * ldh + units[i]] += sign * sum<T>(acc[r][i]);
}

template <typename T>
using DotTile = void (*)(int64_t, const T*, int64_t, const T*, int64_t, const int32_t*, T, T*,
                         int64_t);

template <typename T>
struct DotTiles {
  DotTile<T> table[kDotRows + 1][kDotUnits + 1];
  DotTiles() { fill<kDotRows, kDotUnits>(); }
  template <int kRows, int kUnits>
  void fill() {
    table[kRows][kUnits] = dot_tile<T, kRows, kUnits>;
    if constexpr (kUnits > 1)
      fill<kRows, kUnits - 1>();
    else if constexpr (kRows > 1)
      fill<kRows - 1, kDotUnits>();
  }
};

template <typename T>
void shared_decode_back(const Launch& launch, const SharedDecodeBack<T>& p) {
  const int64_t K = p.samples, B = p.rows, H = p.hidden, V = p.vocab;
  const bool dropped = p.lists.dropped;
  const DotTiles<T> tiles;
  const T sign = T(dropped ? -p.lists.scale : p.lists.scale);
  // Each thread has units of its own, so every element of dh is summed by one thread in one order.
  parallel(launch, H, grain_of(B * V), [&](int64_t begin, int64_t end) {
    for (int64_t b = 0; b < B; ++b) {
      T* dh = p.dh + b * H + begin;
      const int64_t count = end - begin;
      if (dropped)
        for_each_vector<T>(
            count, [&](int64_t j, int n) { store(dh + j, load(dh + j, n) * T(p.lists.scale), n); });
      else
        memset(dh, 0, count * sizeof(T));
    }
    for (int64_t v = 0; v < V; v += kDotBlock<T>) {
      const int64_t size = V - v < kDotBlock<T> ? V - v : kDotBlock<T>;
      for (int64_t k = 0; k < K; ++k) {
        const int32_t* units = p.lists.units + k * H;
        int64_t first = 0, last = p.lists.counts[k];
        while (first < last && units[first] < begin) ++first;
        while (last > first && units[last - 1] >= end) --last;
        const T* u = p.u + k * B * V + v;
        for (int64_t r = 0; r < B; r += kDotRows)
          for (int64_t i = first; i < last; i += kDotUnits) {
            const int64_t rows = B - r < kDotRows ? B - r : kDotRows;
            const int64_t count = last - i < kDotUnits ? last - i : kDotUnits;
            tiles.table[rows][count](size, u + r * V, V, p.weight_t + v, V, units + i, sign,
                                     p.dh + r * H, H);
          }
      }
    }
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
