// The decoder for one or a few rows, in one pass over its weight: `W^T softmax(W h)` is attention
// with W as keys and values, so an online softmax needs W from memory once, not twice. Memory is
// what word-by-word reading waits for. Struct: kernels/kernels.h.
#pragma once

#include "block_decode.h"

namespace fused_recoder {
namespace FR_ISA {

// Vocabulary rows at a time; the vocabulary is cut into kStreamChunks pieces, whatever the number
// of threads, so that sums are always taken in the same order.
constexpr int kStreamTile = 8;
constexpr int64_t kStreamChunks = 64;

// What a chunk knows of one row: logits relative to their maximum in the chunk.
template <typename T>
struct StreamState {
  T maximum;
  T sum;           // of e = exp(l - maximum)
  T weighted;      // of e * (l - maximum)
  T target_logit;  // of the target, if it is in this chunk
  T best_index;    // of the maximum, as a number: exact up to 2^24 tokens in float
};
constexpr int64_t kStreamHeader = 8;  // elements kept for StreamState before the sums over rows
static_assert(sizeof(StreamState<float>) <= kStreamHeader * sizeof(float) &&
              sizeof(StreamState<double>) <= kStreamHeader * sizeof(double));

// Per (chunk, row): the header, sum of e * W [H] and sum of e * (l - maximum) * W [H].
template <typename T>
FR_INLINE int64_t stream_stride(int64_t hidden) {
  return kStreamHeader + 2 * hidden;
}

template <typename T>
int64_t stream_scratch(int64_t rows, int64_t hidden) {
  const int64_t streamed = kStreamChunks * rows * stream_stride<T>(hidden);
  const int64_t blocked = kBlockChunks * block_stride(rows, hidden);
  return rows > kStreamRows || blocked > streamed ? blocked : streamed;
}

// One tile of vocabulary rows [v, v + count) for one row h.
template <typename T, bool kEntropy>
FR_INLINE void stream_tile(const StreamDecode<T>& p, int64_t b, int64_t v, int count,
                           StreamState<T>& s, T* sum_w, T* sum_lw) {
  const int64_t H = p.hidden;
  const T* h = p.h + b * H;
  const T* w[kStreamTile];  // [H] each; rows behind the end repeat the first and weigh nothing
  for (int r = 0; r < kStreamTile; ++r) w[r] = p.weight + (v + (r < count ? r : 0)) * H;
  Vec<T> dots[kStreamTile] = {};
  for_each_vector<T>(H, [&](int64_t j, int n) {
    const Vec<T> h_j = load(h + j, n);
#pragma GCC unroll 8
    for (int r = 0; r < kStreamTile; ++r) dots[r] += h_j * load(w[r] + j, n);
  });
  alignas(64) T l[kStreamTile], e[kStreamTile], x[kStreamTile];
  T tile_max = -INFINITY;
  for (int r = 0; r < kStreamTile; ++r) {
    l[r] = r < count ? sum<T>(dots[r]) + (p.bias != nullptr ? p.bias[v + r] : T(0)) : -INFINITY;
    if (p.logits != nullptr && r < count) p.logits[b * p.vocab + v + r] = l[r];
    if (p.targets != nullptr && p.targets[b] == v + r && r < count) s.target_logit = l[r];
    tile_max = l[r] > tile_max ? l[r] : tile_max;
  }
  if (tile_max > s.maximum) {
    for (int r = count - 1; r >= 0; --r)
      if (l[r] == tile_max) s.best_index = T(v + r);
    if (s.sum > T(0)) {
      const T shift = s.maximum - tile_max, factor = T(::exp(double(shift)));
      if (kEntropy) {  // e * (l - new) = factor * (e * (l - old) + e * shift)
        for_each_vector<T>(H, [&](int64_t j, int n) {
          store(sum_lw + j, (load(sum_lw + j, n) + shift * load(sum_w + j, n)) * factor, n);
        });
        s.weighted = (s.weighted + shift * s.sum) * factor;
      }
      multiply_by(factor, sum_w, H);
      s.sum *= factor;
    }
    s.maximum = tile_max;
  }
  for (int r = 0; r < kStreamTile; r += kLanes<T>) {
    const int n = kStreamTile - r < kLanes<T> ? kStreamTile - r : kLanes<T>;
    const Vec<T> shifted_l = shifted(l, r, n, s.maximum);
    store(x + r, shifted_l, n);
    store(e + r, exp<T>(shifted_l), n);
  }
  for (int r = 0; r < count; ++r) {
    s.sum += e[r];
    s.weighted += e[r] * x[r];
  }
  if (p.dh == nullptr) return;
  for_each_vector<T>(H, [&](int64_t j, int n) {
    Vec<T> total = load(sum_w + j, n), total_l = kEntropy ? load(sum_lw + j, n) : Vec<T>{};
#pragma GCC unroll 8
    for (int r = 0; r < kStreamTile; ++r) {
      const Vec<T> w_r = load(w[r] + j, n);
      total += e[r] * w_r;
      if (kEntropy) total_l += (e[r] * x[r]) * w_r;
    }
    store(sum_w + j, total, n);
    if (kEntropy) store(sum_lw + j, total_l, n);
  });
}

template <typename T, bool kEntropy>
void stream_chunks(const Launch& launch, const StreamDecode<T>& p) {
  const int64_t H = p.hidden, stride = stream_stride<T>(H);
  const int64_t tiles = (p.vocab + kStreamTile - 1) / kStreamTile;
  const int64_t per_chunk = (tiles + kStreamChunks - 1) / kStreamChunks * kStreamTile;
  parallel(launch, kStreamChunks, grain_of(per_chunk * H), [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * per_chunk;
      const int64_t last = first + per_chunk < p.vocab ? first + per_chunk : p.vocab;
      T* base = p.scratch + chunk * p.rows * stride;
      for (int64_t b = 0; b < p.rows; ++b) {
        *reinterpret_cast<StreamState<T>*>(base + b * stride) = {T(-INFINITY), T(0), T(0), T(0),
                                                                 T(0)};
        memset(base + b * stride + kStreamHeader, 0, 2 * H * sizeof(T));
      }
      for (int64_t v = first; v < last; v += kStreamTile)
        for (int64_t b = 0; b < p.rows; ++b) {
          T* sums = base + b * stride + kStreamHeader;
          stream_tile<T, kEntropy>(
              p, b, v, last - v < kStreamTile ? static_cast<int>(last - v) : kStreamTile,
              *reinterpret_cast<StreamState<T>*>(base + b * stride), sums, sums + H);
        }
    }
  });
}

template <typename T>
void stream_decode(const Launch& launch, const StreamDecode<T>& p) {
  if (p.direction != nullptr || p.rows > kStreamRows) return block_decode(launch, p);
  const bool entropy = p.kind == SignalKind::kEntropy;
  if (entropy)
    stream_chunks<T, true>(launch, p);
  else
    stream_chunks<T, false>(launch, p);

  const int64_t H = p.hidden, stride = stream_stride<T>(H);
  for (int64_t b = 0; b < p.rows; ++b) {
    T* dh = p.dh != nullptr ? p.dh + b * H : nullptr;  // [H]
    if (p.targets != nullptr && p.targets[b] < 0) {
      finish_ignored_row(p, b);
      continue;
    }
    const auto state = [&](int64_t chunk) -> const StreamState<T>& {
      return *reinterpret_cast<const StreamState<T>*>(p.scratch + (chunk * p.rows + b) * stride);
    };
    RowSoftmax<T> row{T(-INFINITY), 0, 0};
    int64_t best = 0;
    T target_logit = T(0);
    for (int64_t chunk = 0; chunk < kStreamChunks; ++chunk) {
      const StreamState<T>& s = state(chunk);
      if (s.maximum > row.maximum) row.maximum = s.maximum, best = int64_t(s.best_index);
      target_logit += s.target_logit;
    }
    if (dh != nullptr) memset(dh, 0, H * sizeof(T));
    alignas(64) T weights[2][kStreamChunks];  // of the chunks' sums of e * W and of e * l * W
    for (int64_t chunk = 0; chunk < kStreamChunks; ++chunk) {
      const StreamState<T>& s = state(chunk);
      const bool empty = !(s.sum != T(0));  // a NaN sum is not empty
      const double shift = empty ? 0 : double(s.maximum) - double(row.maximum);
      const double factor = empty ? 0 : ::exp(shift);
      row.sum += factor * s.sum;
      row.weighted += factor * (s.weighted + shift * s.sum);
      weights[0][chunk] = T(factor);
      weights[1][chunk] = T(shift);
    }
    const double mean_l = row.weighted / row.sum;  // relative to the maximum
    for (int64_t chunk = 0; chunk < kStreamChunks && dh != nullptr; ++chunk) {
      const T factor = T(weights[0][chunk] / row.sum);
      if (factor == T(0)) continue;
      const T* sums = p.scratch + (chunk * p.rows + b) * stride + kStreamHeader;
      // entropy: dh = -(E[l W] - E[l] E[W]) = -sum_chunks factor * (sum_lw + (shift - E[l]) sum_w)
      const T offset = T(weights[1][chunk] - mean_l);
      for_each_vector<T>(H, [&](int64_t j, int n) {
        const Vec<T> w = load(sums + j, n);
        const Vec<T> part = entropy ? -(load(sums + H + j, n) + offset * w) : w;
        store(dh + j, load(dh + j, n) + factor * part, n);
      });
    }
    if (entropy) {
      p.delta[b] = T(::log(row.sum) - mean_l);
      if (p.scale != nullptr) p.scale[b] = T(1);
      continue;
    }
    if (p.kind == SignalKind::kSoftmax) {
      p.delta[b] = T(double(row.maximum) + ::log(row.sum));
      continue;
    }
    const int64_t target = p.targets != nullptr ? p.targets[b] : best;
    const double log_p = row_log_p(row, p.targets != nullptr ? target_logit : row.maximum);
    finish_gold_row(p, b, target, log_p);
  }
}

}  // namespace FR_ISA
}  // namespace fused_recoder
