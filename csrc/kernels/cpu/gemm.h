// Two GEMMs. The first is for a right-hand side that stays the same for a whole sequence: b is
// packed once, in panels of kPanel columns, and every time step multiplies its few rows against
// it. The second adds up the gradient of a weight over the rows of a sequence. Neither allocates,
// and both give the same bits for any number of threads: each element of c is summed by one thread
// in a fixed order. Structs: kernels/kernels.h.
#pragma once

#include "simd.h"

namespace fused_recoder {
namespace FR_ISA {

// The register tile: kTileRows x kPanelVecs accumulators, 16 registers up to AVX2, 32 beyond.
constexpr int kTileRows = FR_VECTOR_BYTES == 64 ? 12 : 6;
constexpr int kPanelVecs = 2;
template <typename T>
constexpr int64_t kPanel = kPanelVecs * kLanes<T>;

// A block of a, [at most kRowBlock, inner block], lives in half of L2. Panels of b stream through:
// each of their cache lines serves all rows of the block.
constexpr int64_t kRowBlock = 96;
template <typename T>
constexpr int64_t kBlockElements = (256 << 10) / sizeof(T);

template <typename T>
int64_t packed_size(int64_t inner, int64_t cols) {
  return (cols + kPanel<T> - 1) / kPanel<T> * kPanel<T> * inner;
}

// Copies the panels [begin, end) of rows [k0, k1) of b.
template <typename T>
FR_INLINE void pack_block(const PackMatrix<T>& p, int64_t begin, int64_t end, int64_t k0,
                          int64_t k1) {
  for (int64_t panel = begin; panel < end; ++panel) {
    T* out = p.packed + panel * p.inner * kPanel<T>;  // [inner, kPanel]
    const T* in = p.b + panel * kPanel<T> * p.stride_cols;
    const int64_t left = p.cols - panel * kPanel<T>;
    const int64_t cols = left < kPanel<T> ? left : kPanel<T>;
    for (int64_t k = k0; k < k1; ++k) {
      const T* row = in + k * p.stride_inner;
      T* packed_row = out + k * kPanel<T>;
      if (cols == kPanel<T> && p.stride_cols == 1)
        memcpy(packed_row, row, kPanel<T> * sizeof(T));
      else if (cols == kPanel<T>)
        for (int64_t n = 0; n < kPanel<T>; ++n) packed_row[n] = row[n * p.stride_cols];
      else
        for (int64_t n = 0; n < kPanel<T>; ++n)
          packed_row[n] = n < cols ? row[n * p.stride_cols] : T(0);
    }
  }
}

template <typename T>
void pack(const Launch& launch, const PackMatrix<T>& p) {
  const int64_t panels = (p.cols + kPanel<T> - 1) / kPanel<T>;
  if (p.stride_cols == 1) {
    // Rows of b are dense: walk over a few of them at a time, all panels, so that every cache line
    // that is read is used up.
    constexpr int64_t rows = 32;
    const int64_t blocks = (p.inner + rows - 1) / rows;
    parallel(launch, blocks, grain_of(rows * p.cols), [&](int64_t begin, int64_t end) {
      for (int64_t k0 = begin * rows; k0 < end * rows && k0 < p.inner; k0 += rows)
        pack_block(p, 0, panels, k0, k0 + rows < p.inner ? k0 + rows : p.inner);
    });
  } else {
    // Columns of b are dense: kPanel streams side by side.
    parallel(launch, panels, grain_of(p.inner * kPanel<T>),
             [&](int64_t begin, int64_t end) { pack_block(p, begin, end, 0, p.inner); });
  }
}

// c[kRows, kPanel] = (add ? c : 0) + bias + a * b[inner, kPanel], with element (r, k) of a at
// a[r * row_stride + k * kInnerStride]; the latter is a constant, so that addresses are cheap.
// `next` is what to prefetch meanwhile: the panel block that comes after b, which the hardware
// would only discover page by page.
template <typename T, int kRows, int kInnerStride = 1>
void tile(int64_t inner, const T* __restrict a, int64_t row_stride, const T* __restrict b,
          const T* next, T* c, int64_t ldc, int64_t cols, const T* bias, bool add) {
  if (add)
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(c + r * ldc, 1);
  Vec<T> acc[kRows][kPanelVecs] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < inner; ++k) {
    for (int64_t line = 0; line < kPanel<T>; line += 64 / sizeof(T))
      __builtin_prefetch(next + k * kPanel<T> + line);
    Vec<T> b_k[kPanelVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVecs; ++v) b_k[v] = load(b + k * kPanel<T> + v * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> a_rk = splat<T>(a[r * row_stride + k * kInnerStride]);
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
using Tile = void (*)(int64_t, const T*, int64_t, const T*, const T*, T*, int64_t, int64_t,
                      const T*, bool);

// Tiles of 1 .. kTileRows rows.
template <typename T, int kInnerStride = 1, int kRows = kTileRows>
FR_INLINE void fill_tiles(Tile<T>* table) {
  if constexpr (kRows > 0) {
    table[kRows] = tile<T, kRows, kInnerStride>;
    fill_tiles<T, kInnerStride, kRows - 1>(table);
  }
}

template <typename T>
void gemm(const Launch& launch, const PackedGemm<T>& p) {
  Tile<T> tiles[kTileRows + 1];
  fill_tiles(tiles);
  const int64_t panels = (p.cols + kPanel<T> - 1) / kPanel<T>;
  // Equal blocks of rows, of tiles of equal height in them, and of the inner dimension.
  const int64_t row_blocks = (p.rows + kRowBlock - 1) / kRowBlock;
  const int64_t block_rows = (p.rows + row_blocks - 1) / row_blocks;
  const int64_t per_panel = (block_rows + kTileRows - 1) / kTileRows;  // tiles
  const int64_t tile_rows = (block_rows + per_panel - 1) / per_panel;
  const int64_t most_inner = kBlockElements<T> / block_rows;
  const int64_t blocks = (p.inner + most_inner - 1) / most_inner;
  const int64_t block = (p.inner + blocks - 1) / blocks;
  // Work is handed out in tiles, row block by row block, panel by panel: a panel at the border of
  // two threads' shares is split between them, so that few panels still balance.
  const int64_t per_block = panels * per_panel;
  const int64_t grain = grain_of(p.inner * kPanel<T> * tile_rows / 4);
  parallel(launch, row_blocks * per_block, grain, [&](int64_t begin, int64_t end) {
    alignas(64) T a_block[kBlockElements<T>];
    for (int64_t rb = begin / per_block; rb * per_block < end; ++rb) {
      const int64_t from = begin > rb * per_block ? begin - rb * per_block : 0;
      const int64_t to = end - rb * per_block < per_block ? end - rb * per_block : per_block;
      const int64_t row0 = rb * block_rows;
      const int64_t rows = p.rows - row0 < block_rows ? p.rows - row0 : block_rows;
      for (int64_t k0 = 0; k0 < p.inner; k0 += block) {
        const int64_t inner = p.inner - k0 < block ? p.inner - k0 : block;
        const T* a = p.a + row0 * p.lda + k0;
        int64_t lda = p.lda;
        // Rows that are far apart would thrash the TLB: bring them together.
        if (blocks > 1 && to - from > per_panel) {
          for (int64_t r = 0; r < rows; ++r)
            memcpy(a_block + r * inner, a + r * lda, inner * sizeof(T));
          a = a_block;
          lda = inner;
        }
        const bool first = k0 == 0;
        for (int64_t panel = from / per_panel; panel * per_panel < to; ++panel) {
          const T* b = p.packed + (panel * p.inner + k0) * kPanel<T>;
          T* c = p.c + row0 * p.ldc + panel * kPanel<T>;
          const int64_t cols = p.cols - panel * kPanel<T>;
          const T* bias = first && p.bias != nullptr ? p.bias + panel * kPanel<T> : nullptr;
          const int64_t done = panel * per_panel;
          const int64_t tile0 = from > done ? from - done : 0;
          const int64_t tile1 = to - done < per_panel ? to - done : per_panel;
          for (int64_t r = tile0 * tile_rows; r < tile1 * tile_rows && r < rows; r += tile_rows) {
            const int64_t in_tile = rows - r < tile_rows ? rows - r : tile_rows;
            const bool last = r + tile_rows >= tile1 * tile_rows && panel + 1 < panels;
            tiles[in_tile](inner, a + r * lda, lda, b, last ? b + p.inner * kPanel<T> : b,
                           c + r * p.ldc, p.ldc, cols, bias, p.accumulate || !first);
          }
        }
      }
    }
  });
}

// The outer GEMM takes blocks of this many rows of a and b; c is read and written once per block.
template <typename T>
constexpr int64_t kOuterBlock = 2560 / sizeof(T);
constexpr int64_t kOuterRows = 16 * kTileRows;
constexpr int64_t kOuterAhead = 8;  // rows of a

template <typename T>
int64_t outer_scratch(int64_t inner, int64_t, int64_t cols) {
  return packed_size<T>(inner < kOuterBlock<T> ? inner : kOuterBlock<T>, cols);
}

template <typename T>
void outer_gemm(const Launch& launch, const OuterGemm<T>& p) {
  Tile<T> tiles[kTileRows + 1];
  fill_tiles<T, kTileRows>(tiles);
  const int64_t panels = (p.cols + kPanel<T> - 1) / kPanel<T>;
  const int64_t row_tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t blocks = (p.inner + kOuterBlock<T> - 1) / kOuterBlock<T>;
  const int64_t block = (p.inner + blocks - 1) / blocks;
  for (int64_t k0 = 0; k0 < p.inner; k0 += block) {
    const int64_t inner = p.inner - k0 < block ? p.inner - k0 : block;
    pack(launch, PackMatrix<T>{inner, p.cols, p.b + k0 * p.cols, p.cols, 1, p.scratch});
    parallel(launch, row_tiles, grain_of(inner * p.cols * kTileRows / 4),
             [&](int64_t begin, int64_t end) {
               // Rows of c at a time, their share of a turned into tiles [inner, kTileRows].
               alignas(64) T a_tiles[kOuterRows * kOuterBlock<T>];
               constexpr int64_t step = kOuterRows / kTileRows;
               for (int64_t first = begin; first < end; first += step) {
                 const int64_t last = first + step < end ? first + step : end;
                 const int64_t row0 = first * kTileRows;
                 const int64_t row1 = last * kTileRows < p.rows ? last * kTileRows : p.rows;
                 for (int64_t k = 0; k < inner; ++k) {
                   const T* in = p.a + (k0 + k) * p.rows;
                   // Each row of a is far from the one before: the hardware does not fetch ahead.
                   if (k + kOuterAhead < inner)
                     for (int64_t r = row0; r < row1; r += 64 / sizeof(T))
                       __builtin_prefetch(in + kOuterAhead * p.rows + r);
                   for (int64_t r = row0; r < row1; r += kTileRows) {
                     T* out = a_tiles + (r - row0) * inner + k * kTileRows;
                     if (row1 - r >= kTileRows)
                       memcpy(out, in + r, kTileRows * sizeof(T));
                     else
                       for (int64_t i = 0; i < row1 - r; ++i) out[i] = in[r + i];
                   }
                 }
                 for (int64_t panel = 0; panel < panels; ++panel) {
                   const T* b = p.scratch + panel * inner * kPanel<T>;
                   for (int64_t r = row0; r < row1; r += kTileRows) {
                     const bool final = r + kTileRows >= row1 && panel + 1 < panels;
                     tiles[row1 - r < kTileRows ? row1 - r : kTileRows](
                         inner, a_tiles + (r - row0) * inner, 1, b,
                         final ? b + inner * kPanel<T> : b, p.c + r * p.cols + panel * kPanel<T>,
                         p.cols, p.cols - panel * kPanel<T>, nullptr, true);
                   }
                 }
               }
             });
  }
}

}  // namespace FR_ISA
}  // namespace fused_recoder
