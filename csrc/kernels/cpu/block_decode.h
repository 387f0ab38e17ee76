// The decoder for some ten rows in one pass over its weight, as in stream_decode.h, but as products
// of blocks: a block of words is read from memory once, and is in the core's cache for both of its
// products, with the states and with the probabilities. Used by stream_decode().
#pragma once

#include "gemm.h"
#include "softmax_signal.h"

namespace fused_recoder {
namespace FR_ISA {

constexpr int64_t kBlockRows = 64;    // at most
constexpr int64_t kBlockWords = 32;   // words at a time
constexpr int64_t kBlockChunks = 16;  // pieces of the vocabulary, whatever the number of threads
constexpr int kDotWords = 8;

// Per chunk: maximum and sum of exponentials of every row, then the sums of e * W [rows,H].
FR_INLINE int64_t block_stride(int64_t rows, int64_t hidden) { return rows * (2 + hidden); }

// Sums of kDotWords vectors.
template <typename T>
FR_INLINE void sums_of(const Vec<T> (&v)[kDotWords], T* out) {
#if FR_VECTOR_BYTES >= 32
  if constexpr (sizeof(T) == 4) {
    typedef float Eight __attribute__((vector_size(32)));
    Eight x[kDotWords];
    for (int i = 0; i < kDotWords; ++i) {
      if constexpr (kLanes<T> == 16)
        x[i] = __builtin_shufflevector(v[i], v[i], 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(v[i], v[i], 8, 9, 10, 11, 12, 13, 14, 15);
      else
        x[i] = (Eight)v[i];
    }
    // Neighbours are added within halves of a vector, where shuffles are cheap; halves come last.
    for (int width = kDotWords; width > 2; width /= 2)
      for (int i = 0; i < width / 2; ++i)
        x[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 2, 8, 10, 4, 6, 12, 14) +
               __builtin_shufflevector(x[2 * i], x[2 * i + 1], 1, 3, 9, 11, 5, 7, 13, 15);
    x[0] = __builtin_shufflevector(x[0], x[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(x[0], x[1], 4, 5, 6, 7, 12, 13, 14, 15);
    memcpy(out, &x[0], sizeof x[0]);
    return;
  }
#endif
  for (int i = 0; i < kDotWords; ++i) out[i] = sum<T>(v[i]);
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

// Logits of the words [v, v + words) for all rows: [rows, kBlockWords], -inf behind the end.
template <typename T>
FR_INLINE void block_logits(const StreamDecode<T>& p, int64_t v, int64_t words, T* out) {
  const int64_t H = p.hidden;
  for (int64_t i = 0; i < kBlockWords; i += kDotWords) {
    if (i >= words) {
      for (int64_t b = 0; b < p.rows; ++b)
        for (int r = 0; r < kDotWords; ++r) out[b * kBlockWords + i + r] = -INFINITY;
      continue;
    }
    const int count = words - i < kDotWords ? static_cast<int>(words - i) : kDotWords;
    const T* w[kDotWords];  // [H] each; those behind the end repeat the first
    for (int r = 0; r < kDotWords; ++r) w[r] = p.weight + (v + i + (r < count ? r : 0)) * H;
    for (int64_t b = 0; b < p.rows; ++b) {
      const T* h = p.h + b * H;
      Vec<T> dots[kDotWords] = {};
      for_each_vector<T>(H, [&](int64_t j, int n) {
        const Vec<T> h_j = load(h + j, n);
#pragma GCC unroll 8
        for (int r = 0; r < kDotWords; ++r) dots[r] += h_j * load(w[r] + j, n);
      });
      T* l = out + b * kBlockWords + i;
      sums_of<T>(dots, l);
      if (p.bias != nullptr)
        for (int r = 0; r < count; ++r) l[r] += p.bias[v + i + r];
      if (p.logits != nullptr) memcpy(p.logits + b * p.vocab + v + i, l, count * sizeof(T));
      for (int r = count; r < kDotWords; ++r) l[r] = -INFINITY;
    }
  }
}

template <typename T>
void block_chunks(const Launch& launch, const StreamDecode<T>& p) {
  const int64_t H = p.hidden, B = p.rows;
  const int64_t blocks = (p.vocab + kBlockWords - 1) / kBlockWords;
  const int64_t per_chunk = (blocks + kBlockChunks - 1) / kBlockChunks * kBlockWords;
  const WeighTiles<T> tiles;
  const int64_t row_tiles = (B + kTileRows - 1) / kTileRows;
  const int64_t tile_rows = (B + row_tiles - 1) / row_tiles;
  parallel(launch, kBlockChunks, grain_of(per_chunk * H), [&](int64_t begin, int64_t end) {
    alignas(64) T e[kBlockRows * kBlockWords];  // [rows, kBlockWords] logits, then exponentials
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      T* maxima = p.scratch + chunk * block_stride(B, H);  // [rows]
      T *sums = maxima + B, *weighed = maxima + 2 * B;     // [rows], [rows,H]
      for (int64_t b = 0; b < B; ++b) maxima[b] = -INFINITY;
      memset(sums, 0, B * (1 + H) * sizeof(T));
      const int64_t first = chunk * per_chunk;
      const int64_t last = first + per_chunk < p.vocab ? first + per_chunk : p.vocab;
      for (int64_t v = first; v < last; v += kBlockWords) {
        const int64_t words = last - v < kBlockWords ? last - v : kBlockWords;
        block_logits(p, v, words, e);
        for (int64_t b = 0; b < B; ++b) {
          T* row = e + b * kBlockWords;
          const T maximum = row_maximum(row, kBlockWords);
          if (maximum > maxima[b]) {
            const T factor = sums[b] > T(0) ? T(::exp(double(maxima[b] - maximum))) : T(0);
            T* w = weighed + b * H;
            if (sums[b] > T(0) && p.dh != nullptr)
              for_each_vector<T>(
                  H, [&](int64_t j, int n) { store(w + j, load(w + j, n) * factor, n); });
            sums[b] *= factor;
            maxima[b] = maximum;
          }
          Vec<T> total{};
          for (int64_t j = 0; j < kBlockWords; j += kLanes<T>) {
            const Vec<T> e_j = exp<T>(shifted(row, j, kLanes<T>, maxima[b]));
            store(row + j, e_j);
            total += e_j;
          }
          sums[b] += sum<T>(total);
        }
        for (int64_t n = 0; n < H && p.dh != nullptr; n += kPanel<T>) {
          const int64_t left = H - n;
          const int vecs = left > kLanes<T> ? 2 : 1;
          const int64_t in_last = left - (vecs - 1) * kLanes<T>;
          const int lanes = in_last < kLanes<T> ? static_cast<int>(in_last) : kLanes<T>;
          for (int64_t b = 0; b < B; b += tile_rows)
            tiles.table[B - b < tile_rows ? B - b : tile_rows][vecs][lanes == kLanes<T>](
                words, e + b * kBlockWords, p.weight + v * H + n, H, weighed + b * H + n, H, lanes);
        }
      }
    }
  });
}

// Puts the chunks together: dh = E_o[W], maximum and sum of a row.
template <typename T>
FR_INLINE RowSoftmax<T> merge_blocks(const StreamDecode<T>& p, int64_t b) {
  const int64_t H = p.hidden, stride = block_stride(p.rows, H);
  RowSoftmax<T> row{T(-INFINITY), 0, 0};
  for (int64_t chunk = 0; chunk < kBlockChunks; ++chunk) {
    const T maximum = p.scratch[chunk * stride + b];
    if (maximum > row.maximum) row.maximum = maximum;
  }
  double factors[kBlockChunks];
  for (int64_t chunk = 0; chunk < kBlockChunks; ++chunk) {
    const T *maxima = p.scratch + chunk * stride, sum = maxima[p.rows + b];
    // An empty chunk has nothing to scale; a NaN sum is not empty.
    factors[chunk] = sum != T(0) ? ::exp(double(maxima[b]) - double(row.maximum)) : 0;
    row.sum += factors[chunk] * sum;
  }
  if (p.dh == nullptr) return row;
  T* dh = p.dh + b * H;
  memset(dh, 0, H * sizeof(T));
  for (int64_t chunk = 0; chunk < kBlockChunks; ++chunk) {
    const T factor = T(factors[chunk] / row.sum);
    if (factor == T(0)) continue;
    const T* weighed = p.scratch + chunk * stride + 2 * p.rows + b * H;
    for_each_vector<T>(H, [&](int64_t j, int n) {
      store(dh + j, load(dh + j, n) + factor * load(weighed + j, n), n);
    });
  }
  return row;
}

// nll and surprisal; p.logits [B,V] is given and ends as the direction where p.direction is.
template <typename T>
void block_decode(const Launch& launch, const StreamDecode<T>& p) {
  block_chunks(launch, p);
  const int64_t H = p.hidden, V = p.vocab;
  parallel(launch, p.rows, grain_of(V), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T *dh = p.dh != nullptr ? p.dh + b * H : nullptr, *logits = p.logits + b * V;
      T* direction = p.direction != nullptr ? p.direction + b * V : nullptr;
      if (p.targets != nullptr && p.targets[b] < 0) {
        if (dh != nullptr) memset(dh, 0, H * sizeof(T));
        if (direction != nullptr) memset(direction, 0, V * sizeof(T));
        p.delta[b] = T(0);
        if (p.scale != nullptr) p.scale[b] = T(0);
        if (p.log_p != nullptr) p.log_p[b] = T(0);
        if (p.chosen != nullptr) p.chosen[b] = p.targets[b];
        continue;
      }
      const RowSoftmax<T> row = merge_blocks(p, b);
      const int64_t target = p.targets != nullptr ? p.targets[b] : row_argmax(logits, V);
      const double log_p = row_log_p(row, logits[target]);
      if (direction != nullptr) {
        const T log_sum = T(::log(row.sum));
        for_each_vector<T>(V, [&](int64_t j, int n) {
          store(direction + j, exp<T>(shifted(logits, j, n, row.maximum) - log_sum), n);
        });
        direction[target] = T(::expm1(log_p));  // p - 1 without cancellation
      }
      const T* w = p.weight + target * H;
      if (dh != nullptr)
        for_each_vector<T>(
            H, [&](int64_t j, int n) { store(dh + j, load(dh + j, n) - load(w + j, n), n); });
      const GoldSignal signal = gold_signal(p.kind, log_p);
      p.delta[b] = T(signal.delta);
      if (p.scale != nullptr) p.scale[b] = T(signal.scale);
      if (p.log_p != nullptr) p.log_p[b] = T(log_p);
      if (p.chosen != nullptr) p.chosen[b] = target;
    }
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
