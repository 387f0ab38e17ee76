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
  T sum, second;   // Z and T of kernels/row_signals.h
  T target_logit;  // of the target, if it is in this chunk
  T best_index;    // of the maximum, as a number: exact up to 2^24 tokens in float
};
constexpr int64_t kStreamHeader = 8;  // elements kept for StreamState before the sums over rows
static_assert(sizeof(StreamState<float>) <= kStreamHeader * sizeof(float) &&
              sizeof(StreamState<double>) <= kStreamHeader * sizeof(double));

// Per (chunk, row): the header, sum of e * W [H] and sum of t * W [H].
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

// The sums of one chunk and row when its maximum rises to `maximum`.
template <typename T, typename Signal>
FR_INLINE void raise_maximum(const Signal& signal, StreamState<T>& s, T maximum, int64_t H,
                             T* sum_w, T* sum_tw) {
  if (s.sum > T(0)) {
    const auto rise = signal.rise(s.maximum - maximum, NumberMath<T>());
    if constexpr (Signal::kSums == 2) {
      for_each_vector<T>(H, [&](int64_t j, int n) {
        store(sum_tw + j, rise.second(load(sum_tw + j, n), load(sum_w + j, n)), n);
      });
      s.second = rise.second(s.second, s.sum);
    }
    multiply_by(rise.factor, sum_w, H);
    s.sum *= rise.factor;
  }
  s.maximum = maximum;
}

// One tile of vocabulary rows [v, v + count) for one row h.
template <typename T, typename Signal>
FR_INLINE void stream_tile(const Signal& signal, const StreamDecode<T>& p, int64_t b, int64_t v,
                           int count, StreamState<T>& s, T* sum_w, T* sum_tw) {
  constexpr bool kTwoSums = Signal::kSums == 2;
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
  alignas(64) T l[kStreamTile], e[kStreamTile], weight[kStreamTile], value[kStreamTile];
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
    raise_maximum(signal, s, tile_max, H, sum_w, sum_tw);
  }
  for (int r = 0; r < kStreamTile; r += kLanes<T>) {
    const int n = kStreamTile - r < kLanes<T> ? kStreamTile - r : kLanes<T>;
    const Vec<T> x = shifted(l, r, n, s.maximum), e_r = exp<T>(x);
    store(e + r, e_r, n);
    if constexpr (kTwoSums) {
      const auto t = signal.summand(x, e_r, VectorMath<T>());
      store(weight + r, t.weight, n);
      store(value + r, t.value, n);
    }
  }
  for (int r = 0; r < count; ++r) {
    s.sum += e[r];
    if constexpr (kTwoSums) s.second += weight[r] * value[r];
  }
  if (p.dh == nullptr) return;
  for_each_vector<T>(H, [&](int64_t j, int n) {
    Vec<T> total = load(sum_w + j, n), total_t = kTwoSums ? load(sum_tw + j, n) : Vec<T>{};
#pragma GCC unroll 8
    for (int r = 0; r < kStreamTile; ++r) {
      const Vec<T> w_r = load(w[r] + j, n);
      total += e[r] * w_r;
      if constexpr (kTwoSums) total_t += (weight[r] * value[r]) * w_r;
    }
    store(sum_w + j, total, n);
    if constexpr (kTwoSums) store(sum_tw + j, total_t, n);
  });
}

template <typename T, typename Signal>
void stream_chunks(const Launch& launch, const Signal& signal, const StreamDecode<T>& p) {
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
          stream_tile(signal, p, b, v,
                      last - v < kStreamTile ? static_cast<int>(last - v) : kStreamTile,
                      *reinterpret_cast<StreamState<T>*>(base + b * stride), sums, sums + H);
        }
    }
  });
}

// A row, put together from what the chunks know of it.
template <typename T>
struct StreamedRow {
  RowSoftmax<T> softmax;
  int64_t best;    // word that has the maximum
  T target_logit;  // of the given target
};

// Also dh, where it is wanted: sum of u W; of one token E_o[W].
template <typename T, typename Signal>
FR_INLINE StreamedRow<T> merge_chunks(const Signal& signal, const StreamDecode<T>& p, int64_t b) {
  const int64_t H = p.hidden, stride = stream_stride<T>(H);
  const T* base = p.scratch + b * stride;  // of the first chunk
  const auto state = [&](int64_t chunk) -> const StreamState<T>& {
    return *reinterpret_cast<const StreamState<T>*>(base + chunk * p.rows * stride);
  };
  StreamedRow<T> merged{{T(-INFINITY), 0, 0}, 0, T(0)};
  RowSoftmax<T>& row = merged.softmax;
  for (int64_t chunk = 0; chunk < kStreamChunks; ++chunk) {
    const StreamState<T>& s = state(chunk);
    if (s.maximum > row.maximum) row.maximum = s.maximum, merged.best = int64_t(s.best_index);
    merged.target_logit += s.target_logit;
  }
  typename Signal::template Rise<double> rises[kStreamChunks];
  for (int64_t chunk = 0; chunk < kStreamChunks; ++chunk) {
    const StreamState<T>& s = state(chunk);
    rises[chunk] = {};
    if (s.sum == T(0)) continue;  // an empty one; a NaN sum is not empty
    rises[chunk] = signal.rise(double(s.maximum) - double(row.maximum), NumberMath<double>());
    row.sum += rises[chunk].factor * s.sum;
    if constexpr (Signal::kSums == 2)
      row.second += rises[chunk].second(double(s.second), double(s.sum));
  }
  if (p.dh == nullptr) return merged;
  T* dh = p.dh + b * H;  // [H]
  memset(dh, 0, H * sizeof(T));
  for (int64_t chunk = 0; chunk < kStreamChunks; ++chunk) {
    const auto share = signal.template share<T>(rises[chunk], row.sum, row.second / row.sum);
    if (share.is_empty()) continue;
    const T* sums = base + chunk * p.rows * stride + kStreamHeader;
    for_each_vector<T>(H, [&](int64_t j, int n) {
      store(dh + j, share.add(load(dh + j, n), load(sums + j, n), load(sums + H + j, n)), n);
    });
  }
  return merged;
}

template <typename T>
FR_INLINE void finish_streamed_row(const OneToken& token, const StreamDecode<T>& p, int64_t b,
                                   const StreamedRow<T>& row) {
  if (token.is_open()) {
    p.delta[b] = T(double(row.softmax.maximum) + ::log(row.softmax.sum));
    return;
  }
  const bool given = p.targets != nullptr;
  const T logit = given ? row.target_logit : row.softmax.maximum;
  finish_gold_row(p, b, given ? p.targets[b] : row.best, row_log_p(row.softmax, logit));
}

template <typename T, typename Signal>
FR_INLINE void finish_streamed_row(const Signal& signal, const StreamDecode<T>& p, int64_t b,
                                   const StreamedRow<T>& row) {
  p.delta[b] = T(signal.delta(row.softmax.sum, row.softmax.second / row.softmax.sum));
  if (p.scale != nullptr) p.scale[b] = T(1);
}

template <typename T>
void stream_decode(const Launch& launch, const StreamDecode<T>& p) {
  if (p.direction != nullptr || p.rows > kStreamRows) return block_decode(launch, p);
  with_row_signal(p.signal, [&](const auto& signal) {
    stream_chunks(launch, signal, p);
    for (int64_t b = 0; b < p.rows; ++b) {
      if (p.targets != nullptr && p.targets[b] < 0)
        finish_ignored_row(p, b);
      else
        finish_streamed_row(signal, p, b, merge_chunks(signal, p, b));
    }
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
