// Two GEMMs. The first is for a right-hand side that stays the same for a whole sequence: b is
// packed once, in panels of kPanel columns, and every time step multiplies its few rows against
// it. The second adds up the gradient of a weight over the rows of a sequence. Neither allocates,
// and both give the same bits for any number of threads: each element of c is summed by one thread
// in a fixed order. Structs: kernels/kernels.h.
#pragma once

#include "operand.h"

namespace fused_recoder {
namespace FR_ISA {

// The register tile: kTileRows x kPanelVecs accumulators, 16 registers up to AVX2, 32 beyond.
constexpr int kTileRows = FR_VECTOR_BYTES == 64 ? 12 : 6;
constexpr int kPanelVecs = 2;
template <typename A>
constexpr int64_t kPanel = kPanelVecs * kLanes<A>;

// A block of a, [at most kRowBlock, inner block], lives in half of L2. Panels of b stream through:
// each of their cache lines serves all rows of the block.
constexpr int64_t kRowBlock = 96;
constexpr int64_t kBlockBytes = 256 << 10;

template <typename S>
using AccumulatorOf = typename Operand<S>::A;
template <typename S>
using UnitOf = typename Operand<S>::Unit;

// Bytes.
template <typename S>
int64_t packed_size(int64_t inner, int64_t cols) {
  constexpr int64_t panel = kPanel<AccumulatorOf<S>>;
  return (cols + panel - 1) / panel * panel * units_of<S>(inner) * sizeof(UnitOf<S>);
}

// Units [u0, u1) of a panel of b whose `cols` columns lie side by side in memory: [units, kPanel].
template <typename S>
FR_INLINE void pack_dense_rows(const PackMatrix<AccumulatorOf<S>>& p, const AccumulatorOf<S>* b,
                               int64_t cols, int64_t u0, int64_t u1, UnitOf<S>* out) {
  using A = AccumulatorOf<S>;
  constexpr int64_t kDepth = Operand<S>::kDepth;
  for (int64_t u = u0; u < u1; ++u) {
    const A* row = b + u * kDepth * p.stride_inner;
    UnitOf<S>* packed_row = out + u * kPanel<A>;
    for_each_vector<A>(cols, [&](int64_t n, int lanes) {
      round_across<S>(row + n, p.stride_inner, u * kDepth + 1 < p.inner, lanes, packed_row + n);
    });
    for (int64_t n = cols; n < kPanel<A>; ++n) packed_row[n] = 0;
  }
}

// The same where the numbers of a column lie side by side, or nothing does.
template <typename S>
FR_INLINE void pack_columns(const PackMatrix<AccumulatorOf<S>>& p, const AccumulatorOf<S>* b,
                            int64_t cols, int64_t u0, int64_t u1, UnitOf<S>* out) {
  using A = AccumulatorOf<S>;
  constexpr int64_t kDepth = Operand<S>::kDepth, kStrip = 64;  // units of a column at a time
  A column[kStrip * kDepth];
  UnitOf<S> units[kPanel<A>][kStrip];
  for (int64_t first = u0; first < u1; first += kStrip) {
    const int64_t count = u1 - first < kStrip ? u1 - first : kStrip;
    const int64_t k0 = first * kDepth, left = p.inner - k0;
    const int64_t inner = left < count * kDepth ? left : count * kDepth;
    for (int64_t n = 0; n < cols; ++n) {
      const A* from = b + k0 * p.stride_inner + n * p.stride_cols;
      if (p.stride_inner != 1) {
        for (int64_t k = 0; k < inner; ++k) column[k] = from[k * p.stride_inner];
        from = column;
      }
      round_along<S>(from, inner, units[n]);
    }
    for (int64_t u = 0; u < count; ++u) {
      UnitOf<S>* packed_row = out + (first + u) * kPanel<A>;
      for (int64_t n = 0; n < cols; ++n) packed_row[n] = units[n][u];
      for (int64_t n = cols; n < kPanel<A>; ++n) packed_row[n] = 0;
    }
  }
}

// The panels [begin, end) of units [u0, u1) of b.
template <typename S>
FR_INLINE void pack_block(const PackMatrix<AccumulatorOf<S>>& p, int64_t begin, int64_t end,
                          int64_t u0, int64_t u1) {
  using A = AccumulatorOf<S>;
  const int64_t units = units_of<S>(p.inner);
  for (int64_t panel = begin; panel < end; ++panel) {
    UnitOf<S>* out = static_cast<UnitOf<S>*>(p.packed) + panel * units * kPanel<A>;
    const A* b = p.b + panel * kPanel<A> * p.stride_cols;
    const int64_t left = p.cols - panel * kPanel<A>, cols = left < kPanel<A> ? left : kPanel<A>;
    if (p.stride_cols == 1)
      pack_dense_rows<S>(p, b, cols, u0, u1, out);
    else
      pack_columns<S>(p, b, cols, u0, u1, out);
  }
}

template <typename S>
void pack(const Launch& launch, const PackMatrix<AccumulatorOf<S>>& p) {
  using A = AccumulatorOf<S>;
  const int64_t panels = (p.cols + kPanel<A> - 1) / kPanel<A>, units = units_of<S>(p.inner);
  if (p.stride_cols == 1) {
    // Rows of b are dense: walk over a few of them at a time, all panels, so that every cache line
    // that is read is used up.
    constexpr int64_t rows = 32 / Operand<S>::kDepth;
    const int64_t blocks = (units + rows - 1) / rows;
    parallel(launch, blocks, grain_of(32 * p.cols), [&](int64_t begin, int64_t end) {
      for (int64_t u0 = begin * rows; u0 < end * rows && u0 < units; u0 += rows)
        pack_block<S>(p, 0, panels, u0, u0 + rows < units ? u0 + rows : units);
    });
  } else {
    // Columns of b are dense: kPanel streams side by side.
    parallel(launch, panels, grain_of(p.inner * kPanel<A>),
             [&](int64_t begin, int64_t end) { pack_block<S>(p, begin, end, 0, units); });
  }
}

// c[kRows, kPanel] = (add ? c : 0) + bias + a * b[units, kPanel], with unit (r, k) of a at
// a[r * row_stride + k * kInnerStride]; the latter is a constant, so that addresses are cheap.
// `next` is what to prefetch meanwhile: the panel block that comes after b, which the hardware
// would only discover page by page.
template <typename S, int kRows, int kInnerStride = 1>
void tile(int64_t units, const UnitOf<S>* __restrict a, int64_t row_stride,
          const UnitOf<S>* __restrict b, const UnitOf<S>* next, AccumulatorOf<S>* c, int64_t ldc,
          int64_t cols, const AccumulatorOf<S>* bias, bool add) {
  using A = AccumulatorOf<S>;
  using O = Operand<S>;
  if (add)
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(c + r * ldc, 1);
  Vec<A> acc[kRows][kPanelVecs] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < units; ++k) {
    for (int64_t line = 0; line < kPanel<A>; line += 64 / sizeof(A))
      __builtin_prefetch(next + k * kPanel<A> + line);
    typename O::Units b_k[kPanelVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVecs; ++v) b_k[v] = O::load_units(b + k * kPanel<A> + v * kLanes<A>);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto a_rk = O::splat_unit(a[r * row_stride + k * kInnerStride]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVecs; ++v) acc[r][v] = O::multiply_add(a_rk, b_k[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kPanelVecs; ++v) {
      const int64_t left = cols - v * kLanes<A>;
      if (left <= 0) break;
      const int n = left < kLanes<A> ? static_cast<int>(left) : kLanes<A>;
      A* out = c + r * ldc + v * kLanes<A>;
      Vec<A> value = acc[r][v];
      if (add) value += load(out, n);
      if (bias != nullptr) value += load(bias + v * kLanes<A>, n);
      store(out, value, n);
    }
}

template <typename S>
using Tile = void (*)(int64_t, const UnitOf<S>*, int64_t, const UnitOf<S>*, const UnitOf<S>*,
                      AccumulatorOf<S>*, int64_t, int64_t, const AccumulatorOf<S>*, bool);

// Tiles of 1 .. kTileRows rows.
template <typename S, int kInnerStride = 1, int kRows = kTileRows>
FR_INLINE void fill_tiles(Tile<S>* table) {
  if constexpr (kRows > 0) {
    table[kRows] = tile<S, kRows, kInnerStride>;
    fill_tiles<S, kInnerStride, kRows - 1>(table);
  }
}

// Rows [rows, inner] of a as units [rows, units].
template <typename S>
FR_INLINE void round_rows(const AccumulatorOf<S>* a, int64_t lda, int64_t rows, int64_t inner,
                          UnitOf<S>* out) {
  const int64_t units = units_of<S>(inner);
  for (int64_t r = 0; r < rows; ++r) round_along<S>(a + r * lda, inner, out + r * units);
}

template <typename S>
void gemm(const Launch& launch, const PackedGemm<AccumulatorOf<S>>& p) {
  using A = AccumulatorOf<S>;
  using Unit = UnitOf<S>;
  constexpr int64_t kDepth = Operand<S>::kDepth;
  constexpr bool kRounds = Operand<S>::kRounds;
  Tile<S> tiles[kTileRows + 1];
  fill_tiles<S>(tiles);
  const int64_t panels = (p.cols + kPanel<A> - 1) / kPanel<A>, units = units_of<S>(p.inner);
  // Equal blocks of rows, of tiles of equal height in them, and of the inner dimension.
  const int64_t row_blocks = (p.rows + kRowBlock - 1) / kRowBlock;
  const int64_t block_rows = (p.rows + row_blocks - 1) / row_blocks;
  const int64_t per_panel = (block_rows + kTileRows - 1) / kTileRows;  // tiles
  const int64_t tile_rows = (block_rows + per_panel - 1) / per_panel;
  const int64_t most_units = kBlockBytes / int64_t(sizeof(Unit)) / block_rows;
  const int64_t blocks = (units + most_units - 1) / most_units;
  const int64_t block = (units + blocks - 1) / blocks;
  // Work is handed out in tiles, row block by row block, panel by panel: a panel at the border of
  // two threads' shares is split between them, so that few panels still balance.
  const int64_t per_block = panels * per_panel;
  const int64_t grain = grain_of(p.inner * kPanel<A> * tile_rows / 4);
  parallel(launch, row_blocks * per_block, grain, [&](int64_t begin, int64_t end) {
    alignas(64) Unit a_block[kBlockBytes / sizeof(Unit)];
    for (int64_t rb = begin / per_block; rb * per_block < end; ++rb) {
      const int64_t from = begin > rb * per_block ? begin - rb * per_block : 0;
      const int64_t to = end - rb * per_block < per_block ? end - rb * per_block : per_block;
      const int64_t row0 = rb * block_rows;
      const int64_t rows = p.rows - row0 < block_rows ? p.rows - row0 : block_rows;
      for (int64_t u0 = 0; u0 < units; u0 += block) {
        const int64_t in_block = units - u0 < block ? units - u0 : block;
        const int64_t k0 = u0 * kDepth, left = p.inner - k0;
        const A* a_rows = p.a + row0 * p.lda + k0;
        const Unit* a = a_block;
        int64_t lda = in_block;
        // Rows that are far apart would thrash the TLB: bring them together.
        if (kRounds || (blocks > 1 && to - from > per_panel)) {
          round_rows<S>(a_rows, p.lda, rows, left < in_block * kDepth ? left : in_block * kDepth,
                        a_block);
        } else if constexpr (!kRounds) {
          a = a_rows;
          lda = p.lda;
        }
        const bool first = u0 == 0;
        for (int64_t panel = from / per_panel; panel * per_panel < to; ++panel) {
          const Unit* b = static_cast<const Unit*>(p.packed) + (panel * units + u0) * kPanel<A>;
          A* c = p.c + row0 * p.ldc + panel * kPanel<A>;
          const int64_t cols = p.cols - panel * kPanel<A>;
          const A* bias = first && p.bias != nullptr ? p.bias + panel * kPanel<A> : nullptr;
          const int64_t done = panel * per_panel;
          const int64_t tile0 = from > done ? from - done : 0;
          const int64_t tile1 = to - done < per_panel ? to - done : per_panel;
          for (int64_t r = tile0 * tile_rows; r < tile1 * tile_rows && r < rows; r += tile_rows) {
            const int64_t in_tile = rows - r < tile_rows ? rows - r : tile_rows;
            const bool last = r + tile_rows >= tile1 * tile_rows && panel + 1 < panels;
            tiles[in_tile](in_block, a + r * lda, lda, b, last ? b + units * kPanel<A> : b,
                           c + r * p.ldc, p.ldc, cols, bias, p.accumulate || !first);
          }
        }
      }
    }
  });
}

// The outer GEMM takes blocks of this many units of a and b; c is read and written once per block.
template <typename S>
constexpr int64_t kOuterBlock = 2560 / sizeof(UnitOf<S>);
constexpr int64_t kOuterRows = 16 * kTileRows;
constexpr int64_t kOuterAhead = 8;  // rows of a

// Bytes.
template <typename S>
int64_t outer_scratch(int64_t inner, int64_t, int64_t cols) {
  const int64_t most = kOuterBlock<S> * Operand<S>::kDepth;
  return packed_size<S>(inner < most ? inner : most, cols);
}

// Columns [row0, row1) of rows [0, inner) of a [.., lda], turned into tiles [units, kTileRows].
template <typename S>
FR_INLINE void turn_tiles(const AccumulatorOf<S>* a, int64_t lda, int64_t inner, int64_t row0,
                          int64_t row1, UnitOf<S>* tiles) {
  using A = AccumulatorOf<S>;
  constexpr int64_t kDepth = Operand<S>::kDepth;
  const int64_t units = units_of<S>(inner);
  for (int64_t u = 0; u < units; ++u) {
    const A* in = a + u * kDepth * lda;
    // Each row of a is far from the one before: the hardware does not fetch ahead.
    for (int64_t d = 0; d < kDepth && u * kDepth + d + kOuterAhead < inner; ++d)
      for (int64_t r = row0; r < row1; r += 64 / sizeof(A))
        __builtin_prefetch(in + (d + kOuterAhead) * lda + r);
    for (int64_t r = row0; r < row1; r += kTileRows) {
      UnitOf<S>* out = tiles + (r - row0) * units + u * kTileRows;
      const int64_t rows = row1 - r < kTileRows ? row1 - r : kTileRows;
      for_each_vector<A>(rows, [&](int64_t i, int n) {
        round_across<S>(in + r + i, lda, u * kDepth + 1 < inner, n, out + i);
      });
    }
  }
}

template <typename S>
void outer_gemm(const Launch& launch, const OuterGemm<AccumulatorOf<S>>& p) {
  using A = AccumulatorOf<S>;
  constexpr int64_t kDepth = Operand<S>::kDepth;
  Tile<S> tiles[kTileRows + 1];
  fill_tiles<S, kTileRows>(tiles);
  const int64_t panels = (p.cols + kPanel<A> - 1) / kPanel<A>;
  const int64_t row_tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t units = units_of<S>(p.inner);
  const int64_t blocks = (units + kOuterBlock<S> - 1) / kOuterBlock<S>;
  const int64_t block = (units + blocks - 1) / blocks * kDepth;  // rows of a and b
  for (int64_t k0 = 0; k0 < p.inner; k0 += block) {
    const int64_t inner = p.inner - k0 < block ? p.inner - k0 : block;
    const int64_t in_block = units_of<S>(inner);
    pack<S>(launch, PackMatrix<A>{inner, p.cols, p.b + k0 * p.cols, p.cols, 1, p.scratch});
    parallel(launch, row_tiles, grain_of(inner * p.cols * kTileRows / 4),
             [&](int64_t begin, int64_t end) {
               // Rows of c at a time, their share of a turned into tiles.
               alignas(64) UnitOf<S> a_tiles[kOuterRows * kOuterBlock<S>];
               constexpr int64_t step = kOuterRows / kTileRows;
               for (int64_t first = begin; first < end; first += step) {
                 const int64_t last = first + step < end ? first + step : end;
                 const int64_t row0 = first * kTileRows;
                 const int64_t row1 = last * kTileRows < p.rows ? last * kTileRows : p.rows;
                 turn_tiles<S>(p.a + k0 * p.rows, p.rows, inner, row0, row1, a_tiles);
                 for (int64_t panel = 0; panel < panels; ++panel) {
                   const UnitOf<S>* b =
                       static_cast<const UnitOf<S>*>(p.scratch) + panel * in_block * kPanel<A>;
                   for (int64_t r = row0; r < row1; r += kTileRows) {
                     const bool final = r + kTileRows >= row1 && panel + 1 < panels;
                     tiles[row1 - r < kTileRows ? row1 - r : kTileRows](
                         in_block, a_tiles + (r - row0) * in_block, 1, b,
                         final ? b + in_block * kPanel<A> : b, p.c + r * p.cols + panel * kPanel<A>,
                         p.cols, p.cols - panel * kPanel<A>, nullptr, true);
                   }
                 }
               }
             });
  }
}

}  // namespace FR_ISA
}  // namespace fused_recoder
