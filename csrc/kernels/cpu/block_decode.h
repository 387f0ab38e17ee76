// The decoder for some ten rows in one pass over its weight, as in stream_decode.h, but as products
// of blocks: a block of words is read from memory once, and is in the core's cache for both of its
// products, with the states and with the probabilities. Used by stream_decode().
#pragma once

#include "gemm.h"
#include "softmax_signal.h"

namespace fused_recoder {
namespace FR_ISA {

constexpr int64_t kBlockWords = 64;         // at most
constexpr int64_t kBlockBytes = 128 << 10;  // of W: a part of L2
constexpr int64_t kBlockChunks = 16;  // pieces of the vocabulary, whatever the number of threads
template <typename T>
constexpr int64_t kLine = 64 / sizeof(T);  // elements of a cache line
constexpr int kBlockDotWords = 4;
// With them accumulators: 12 of 16 registers, 24 of 32.
constexpr int kBlockDotRows = FR_VECTOR_BYTES == 64 ? 6 : 3;

// Words at a time.
template <typename T>
FR_INLINE int64_t block_words(int64_t hidden) {
  const int64_t fit = kBlockBytes / (hidden * sizeof(T)) / 16 * 16;
  return fit < 16 ? 16 : fit < kBlockWords ? fit : kBlockWords;
}

// A chunk of the vocabulary.
template <typename T>
FR_INLINE int64_t chunk_words(const StreamDecode<T>& p) {
  const int64_t block = block_words<T>(p.hidden), blocks = (p.vocab + block - 1) / block;
  return (blocks + kBlockChunks - 1) / kBlockChunks * block;
}

// What is known of a chunk.
template <typename T>
struct BlockChunk {
  int64_t first, last;  // its words
  T* maxima;            // [rows] of the logits
  T* sums;              // [rows] of e = exp(l - maximum)
  T* target_logits;     // [rows] of the targets that are in it
  T* weighed;           // [rows,H] sums of e * W
};

FR_INLINE int64_t block_stride(int64_t rows, int64_t hidden) { return rows * (3 + hidden); }

template <typename T>
FR_INLINE BlockChunk<T> block_chunk(const StreamDecode<T>& p, int64_t chunk) {
  const int64_t words = chunk_words(p), B = p.rows, first = chunk * words;
  T* scratch = p.scratch + chunk * block_stride(B, p.hidden);
  return {first,           first + words < p.vocab ? first + words : p.vocab,
          scratch,         scratch + B,
          scratch + 2 * B, scratch + 3 * B};
}

// Whether the exponentials are kept in the place of the direction, which needs but a factor then.
// (The most probable token is looked for among logits.)
template <typename T>
FR_INLINE bool keeps_exponentials(const StreamDecode<T>& p) {
  return p.direction != nullptr && p.targets != nullptr;
}

// Sums of the lanes of kBlockDotWords vectors.
template <typename T>
FR_INLINE void sums_of(const Vec<T> (&v)[kBlockDotWords], T* out) {
#if FR_VECTOR_BYTES >= 32
  if constexpr (sizeof(T) == 4) {
    typedef float Eight __attribute__((vector_size(32)));
    Eight x[kBlockDotWords];
    for (int i = 0; i < kBlockDotWords; ++i) {
      if constexpr (kLanes<T> == 16)
        x[i] = __builtin_shufflevector(v[i], v[i], 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v[i], v[i], 8, 9, 10, 11, 12, 13, 14, 15);
      else
        x[i] = (Eight)v[i];
    }
    // Neighbours are added within halves of a vector, where shuffles are cheap; halves come last.
    const auto pairs = [](Eight a, Eight b) {
      return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
             __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    };
    const Eight all = pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
    const auto sums = __builtin_shufflevector(all, all, 0, 1, 2, 3) +
                      __builtin_shufflevector(all, all, 4, 5, 6, 7);
    memcpy(out, &sums, sizeof sums);
    return;
  }
#endif
  for (int i = 0; i < kBlockDotWords; ++i) out[i] = sum<T>(v[i]);
}

// The same of two rows of vectors at once, in about half the instructions.
template <typename T>
FR_INLINE void sums_of(const Vec<T> (&v)[kBlockDotWords], const Vec<T> (&w)[kBlockDotWords], T* out,
                       T* next) {
#if FR_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) {
    const auto pairs = [](Vec<T> a, Vec<T> b) {
      return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28,
                                     30) +
             __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29,
                                     31);
    };
    const Vec<T> x = pairs(pairs(v[0], v[1]), pairs(v[2], v[3]));
    const Vec<T> y = pairs(pairs(w[0], w[1]), pairs(w[2], w[3]));
    const Vec<T> halves =
        __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
        __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const auto sums = __builtin_shufflevector(halves, halves, 0, 1, 2, 3, 8, 9, 10, 11) +
                      __builtin_shufflevector(halves, halves, 4, 5, 6, 7, 12, 13, 14, 15);
    memcpy(out, &sums, sizeof sums / 2);
    memcpy(next, reinterpret_cast<const T*>(&sums) + kBlockDotWords, sizeof sums / 2);
    return;
  }
#endif
  sums_of<T>(v, out);
  sums_of<T>(w, next);
}

// c[kRows, kVecs vectors] += a[kRows, words] * b[words, ...]; the last vector has `lanes` lanes,
// which are all of them if kWhole.
template <typename T, int kRows, int kVecs, bool kWhole>
void weigh_tile(int64_t words, const T* __restrict a, const T* __restrict b, int64_t ldb, T* c,
                int64_t ldc, int lanes) {
  const auto lanes_of = [&](int v) { return kWhole || v < kVecs - 1 ? kLanes<T> : lanes; };
  Vec<T> acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) acc[r][v] = load(c + r * ldc + v * kLanes<T>, lanes_of(v));
#pragma GCC unroll 2
  for (int64_t k = 0; k < words; ++k) {
    Vec<T> b_k[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) b_k[v] = load(b + k * ldb + v * kLanes<T>, lanes_of(v));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> a_rk = splat<T>(a[r * kBlockWords + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[r][v] += a_rk * b_k[v];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) store(c + r * ldc + v * kLanes<T>, acc[r][v], lanes_of(v));
}

template <typename T>
using WeighTile = void (*)(int64_t, const T*, const T*, int64_t, T*, int64_t, int);

// By rows, vectors, and whether all vectors are whole.
template <typename T>
struct WeighTiles {
  WeighTile<T> table[kTileRows + 1][kPanelVecs + 1][2];
  WeighTiles() { fill<kTileRows>(); }
  template <int kRows>
  void fill() {
    table[kRows][1][0] = weigh_tile<T, kRows, 1, false>;
    table[kRows][1][1] = weigh_tile<T, kRows, 1, true>;
    table[kRows][2][0] = weigh_tile<T, kRows, 2, false>;
    table[kRows][2][1] = weigh_tile<T, kRows, 2, true>;
    if constexpr (kRows > 1) fill<kRows - 1>();
  }
};

// Products of kRows rows of h [.., H] with kBlockDotWords words w [H] each: out [kRows,
// kBlockWords].
template <typename T, int kRows>
void dot_tile(int64_t H, const T* h, const T* const* w, T* out) {
  Vec<T> dots[kRows][kBlockDotWords] = {};
  for_each_vector<T>(H, [&](int64_t j, int n) {
    Vec<T> h_j[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) h_j[r] = in_register<T>(load(h + r * H + j, n));
#pragma GCC unroll 8
    for (int i = 0; i < kBlockDotWords; ++i) {
      const Vec<T> w_j = in_register<T>(load(w[i] + j, n));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) dots[r][i] += h_j[r] * w_j;
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r + 1 < kRows; r += 2)
    sums_of<T>(dots[r], dots[r + 1], out + r * kBlockWords, out + (r + 1) * kBlockWords);
  if constexpr (kRows % 2 == 1) sums_of<T>(dots[kRows - 1], out + (kRows - 1) * kBlockWords);
}

template <typename T>
using BlockDotTile = void (*)(int64_t, const T*, const T* const*, T*);

// By rows.
template <typename T>
struct BlockDotTiles {
  BlockDotTile<T> table[kBlockDotRows + 1];
  BlockDotTiles() { fill<kBlockDotRows>(); }
  template <int kRows>
  void fill() {
    table[kRows] = dot_tile<T, kRows>;
    if constexpr (kRows > 1) fill<kRows - 1>();
  }
};

// Products of all rows with the words [v, v + words): [rows, kBlockWords].
template <typename T>
FR_INLINE void block_dots(const StreamDecode<T>& p, const BlockDotTiles<T>& tiles, int64_t v,
                          int64_t words, T* out) {
  const int64_t H = p.hidden, row_tiles = (p.rows + kBlockDotRows - 1) / kBlockDotRows;
  const int64_t group = kBlockDotWords * H;  // elements of W
  const int64_t share = (group / row_tiles + kLine<T>) / kLine<T> * kLine<T>;
  for (int64_t i = 0; i < words; i += kBlockDotWords) {
    const T* w[kBlockDotWords];  // those behind the end repeat the first
    for (int r = 0; r < kBlockDotWords; ++r)
      w[r] = p.weight + (v + (i + r < words ? i + r : i)) * H;
    // Every tile fetches its share of the next words: the hardware would find them too late.
    const T* next = p.weight + (v + i) * H + group;
    int64_t b = 0;
    for (int64_t left = row_tiles; left > 0; --left, next += share) {
      for (int64_t j = 0; j < share; j += kLine<T>) __builtin_prefetch(next + j);
      const int64_t rows = (p.rows - b + left - 1) / left;  // tiles of about the same size
      tiles.table[rows](H, p.h + b * H, w, out + b * kBlockWords + i);
      b += rows;
    }
  }
}

// Products become logits, also in `kept` unless it is null; -inf behind the end. Returns the
// largest.
template <typename T>
FR_INLINE T finish_logits(const T* bias, int64_t words, T* row, T* kept) {
  Vec<T> maximum = splat<T>(-INFINITY);
  for (int64_t j = 0; j < words; j += kLanes<T>) {
    const int n = words - j < kLanes<T> ? static_cast<int>(words - j) : kLanes<T>;
    Vec<T> l = load(row + j, n, T(-INFINITY));
    if (bias != nullptr) l += load(bias + j, n);
    store(row + j, l);
    if (kept != nullptr) store(kept + j, l, n);
    maximum = max<T>(maximum, l);
  }
  return largest<T>(maximum);
}

// Row b of a block that starts at word v: products become exponentials.
template <typename T>
FR_INLINE void block_softmax(const StreamDecode<T>& p, const BlockChunk<T>& c, int64_t b, int64_t v,
                             int64_t words, T* row) {
  const bool keeps = keeps_exponentials(p);
  T* kept = keeps ? p.direction + b * p.vocab : nullptr;  // [V]
  const T maximum = finish_logits(p.bias != nullptr ? p.bias + v : nullptr, words, row,
                                  keeps ? nullptr : p.logits + b * p.vocab + v);
  if (p.targets != nullptr && p.targets[b] >= v && p.targets[b] < v + words)
    c.target_logits[b] = row[p.targets[b] - v];
  if (maximum > c.maxima[b]) {
    if (c.sums[b] > T(0)) {
      const T factor = T(::exp(double(c.maxima[b] - maximum)));
      c.sums[b] *= factor;
      if (p.dh != nullptr) multiply_by(factor, c.weighed + b * p.hidden, p.hidden);
      if (keeps) multiply_by(factor, kept + c.first, v - c.first);
    }
    c.maxima[b] = maximum;
  }
  Vec<T> total{};
  for (int64_t j = 0; j < words; j += kLanes<T>) {
    const Vec<T> e = exp<T>(shifted(row, j, kLanes<T>, c.maxima[b]));
    store(row + j, e);
    if (keeps) store(kept + v + j, e, words - j < kLanes<T> ? int(words - j) : kLanes<T>);
    total += e;
  }
  c.sums[b] += sum<T>(total);
}

template <typename T>
void block_chunks(const Launch& launch, const StreamDecode<T>& p) {
  const int64_t H = p.hidden, B = p.rows, block = block_words<T>(H);
  const WeighTiles<T> tiles;
  const BlockDotTiles<T> dot_tiles;
  const int64_t row_tiles = (B + kTileRows - 1) / kTileRows;
  const int64_t tile_rows = (B + row_tiles - 1) / row_tiles;
  parallel(launch, kBlockChunks, grain_of(chunk_words(p) * H), [&](int64_t begin, int64_t end) {
    // [rows, kBlockWords] logits, then exponentials; on the stack of every thread
    alignas(64) T e[kStreamGoldRows * kBlockWords];
    static_assert(sizeof e <= 64 << 10);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const BlockChunk<T> c = block_chunk(p, chunk);
      for (int64_t b = 0; b < B; ++b) c.maxima[b] = -INFINITY;
      memset(c.sums, 0, B * sizeof(T));
      memset(c.weighed, 0, B * H * sizeof(T));
      for (int64_t v = c.first; v < c.last; v += block) {
        const int64_t words = c.last - v < block ? c.last - v : block;
        block_dots(p, dot_tiles, v, words, e);
        for (int64_t b = 0; b < B; ++b) block_softmax(p, c, b, v, words, e + b * kBlockWords);
        for (int64_t n = 0; n < H && p.dh != nullptr; n += kPanel<T>) {
          const int64_t left = H - n;
          const int vecs = left > kLanes<T> ? 2 : 1;
          const int64_t in_last = left - (vecs - 1) * kLanes<T>;
          const int lanes = in_last < kLanes<T> ? static_cast<int>(in_last) : kLanes<T>;
          const T* w = p.weight + v * H + n;
          for (int64_t b = 0; b < B; b += tile_rows)
            tiles.table[B - b < tile_rows ? B - b : tile_rows][vecs][lanes == kLanes<T>](
                words, e + b * kBlockWords, w, H, c.weighed + b * H + n, H, lanes);
        }
      }
    }
  });
}

// Puts the chunks of a row together: its maximum and sum, the factor that turns each chunk's
// exponentials into probabilities, and dh = E_o[W].
template <typename T>
FR_INLINE RowSoftmax<T> merge_blocks(const StreamDecode<T>& p, int64_t b,
                                     T (&factors)[kBlockChunks]) {
  RowSoftmax<T> row{T(-INFINITY), 0, 0};
  for (int64_t chunk = 0; chunk < kBlockChunks; ++chunk) {
    const T maximum = block_chunk(p, chunk).maxima[b];
    if (maximum > row.maximum) row.maximum = maximum;
  }
  double unnormalised[kBlockChunks];
  for (int64_t chunk = 0; chunk < kBlockChunks; ++chunk) {
    const BlockChunk<T> c = block_chunk(p, chunk);
    // An empty chunk has nothing to scale; a NaN sum is not empty.
    unnormalised[chunk] = c.sums[b] != T(0) ? ::exp(double(c.maxima[b]) - double(row.maximum)) : 0;
    row.sum += unnormalised[chunk] * c.sums[b];
  }
  for (int64_t chunk = 0; chunk < kBlockChunks; ++chunk)
    factors[chunk] = T(unnormalised[chunk] / row.sum);
  if (p.dh == nullptr) return row;
  const int64_t H = p.hidden;
  T* dh = p.dh + b * H;
  memset(dh, 0, H * sizeof(T));
  for (int64_t chunk = 0; chunk < kBlockChunks; ++chunk) {
    if (factors[chunk] == T(0)) continue;
    const T* weighed = block_chunk(p, chunk).weighed + b * H;
    for_each_vector<T>(H, [&](int64_t j, int n) {
      store(dh + j, load(dh + j, n) + factors[chunk] * load(weighed + j, n), n);
    });
  }
  return row;
}

// A row whose target is to be ignored has no signal.
template <typename T>
FR_INLINE void finish_ignored_row(const StreamDecode<T>& p, int64_t b) {
  if (p.dh != nullptr) memset(p.dh + b * p.hidden, 0, p.hidden * sizeof(T));
  ignore_row<T>(p, b);
}

// nll and surprisal: dh is E_o[W] so far.
template <typename T>
FR_INLINE void finish_gold_row(const StreamDecode<T>& p, int64_t b, int64_t target, double log_p) {
  if (p.dh != nullptr) {
    const T* w = p.weight + target * p.hidden;  // [H]
    T* dh = p.dh + b * p.hidden;                // [H]
    for_each_vector<T>(
        p.hidden, [&](int64_t j, int n) { store(dh + j, load(dh + j, n) - load(w + j, n), n); });
  }
  write_gold_values<T>(p, b, target, log_p);
}

// nll and surprisal; p.logits [B,V] is given.
template <typename T>
void block_decode(const Launch& launch, const StreamDecode<T>& p) {
  block_chunks(launch, p);
  const int64_t V = p.vocab;
  parallel(launch, p.rows, grain_of(V), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T* logits = p.logits + b * V;
      T* direction = p.direction != nullptr ? p.direction + b * V : nullptr;
      if (p.targets != nullptr && p.targets[b] < 0) {
        finish_ignored_row(p, b);
        continue;
      }
      T factors[kBlockChunks];
      const RowSoftmax<T> row = merge_blocks(p, b, factors);
      const int64_t target = p.targets != nullptr ? p.targets[b] : row_argmax(logits, V);
      const T target_logit = p.targets != nullptr
                                 ? block_chunk(p, target / chunk_words(p)).target_logits[b]
                                 : logits[target];
      const double log_p = row_log_p(row, target_logit);
      if (keeps_exponentials(p)) {
        for (int64_t chunk = 0; chunk < kBlockChunks; ++chunk) {
          const BlockChunk<T> c = block_chunk(p, chunk);
          if (c.first < c.last) multiply_by(factors[chunk], direction + c.first, c.last - c.first);
        }
      } else if (direction != nullptr) {
        const T log_sum = T(::log(row.sum));
        for_each_vector<T>(V, [&](int64_t j, int n) {
          store(direction + j, exp<T>(shifted(logits, j, n, row.maximum) - log_sum), n);
        });
      }
      if (direction != nullptr) direction[target] = T(::expm1(log_p));  // without cancellation
      finish_gold_row(p, b, target, log_p);
    }
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
