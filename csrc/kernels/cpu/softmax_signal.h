// Softmax, error signal and their first and second derivatives, one row of logits at a time: the
// row (40 KB at V = 10,000) stays in the core's cache, so memory is read once and written once.
// Structs: kernels/kernels.h.
#pragma once

#include "simd.h"

namespace fused_recoder {
namespace FR_ISA {

// Sums over a row are taken in blocks of this size: the error of a float sum over a large
// vocabulary then grows with the number of blocks, not with V.
constexpr int64_t kSumBlock = 4096;

template <typename T>
struct RowSoftmax {
  T maximum;
  double sum;       // of exp(l - maximum)
  double weighted;  // of exp(l - maximum) * (l - maximum); only if kWeighted
};

template <typename T>
FR_INLINE T row_maximum(const T* logits, int64_t V) {
  Vec<T> best = splat<T>(-INFINITY);
  for_each_vector<T>(
      V, [&](int64_t j, int n) { best = max<T>(load(logits + j, n, T(-INFINITY)), best); });
  return largest<T>(best);
}

template <typename T>
FR_INLINE int64_t row_argmax(const T* logits, int64_t V) {
  const T maximum = row_maximum(logits, V);
  for (int64_t j = 0; j < V; ++j)
    if (logits[j] == maximum) return j;
  return 0;  // a row of NaN
}

// logits[j] - maximum, with -inf made finite: 0 * (-inf) would be NaN where the limit is 0.
// (A NaN is not below anything and stays.)
template <typename T>
FR_INLINE Vec<T> shifted(const T* logits, int64_t j, int n, T maximum) {
  const Vec<T> l = load(logits + j, n, maximum), x = l - maximum;
  return l == T(-INFINITY) || x < T(-1e30) ? splat<T>(T(-1e30)) : x;
}

// Writes exp(l - maximum) to `exps` unless it is null; it may be the memory of `logits`.
template <typename T, bool kWeighted>
FR_INLINE RowSoftmax<T> row_softmax(const T* logits, T* exps, int64_t V) {
  RowSoftmax<T> row{row_maximum(logits, V), 0, 0};
  for (int64_t start = 0; start < V; start += kSumBlock) {
    const int64_t size = V - start < kSumBlock ? V - start : kSumBlock;
    Vec<T> total{}, weighted{};
    for_each_vector<T>(size, [&](int64_t j, int n) {
      const Vec<T> x = shifted(logits, start + j, n, row.maximum);
      Vec<T> e = exp<T>(x);
      if (n < kLanes<T>) {  // lanes behind the end do not count
        T lanes[kLanes<T>] = {};
        store(lanes, e, n);
        e = load(lanes);
      }
      total += e;
      if (kWeighted) weighted += e * x;
      if (exps != nullptr) store(exps + start + j, e, n);
    });
    row.sum += sum<T>(total);
    if (kWeighted) row.weighted += sum<T>(weighted);
  }
  return row;
}

// log p of a token. Scalars of a row are computed in double: an error there would be common to the
// whole row, and cost next to nothing.
template <typename T>
FR_INLINE double row_log_p(const RowSoftmax<T>& row, T logit) {
  return (double(logit) - double(row.maximum)) - ::log(row.sum);
}

template <typename T>
void softmax_signal(const Launch& launch, const SoftmaxSignal<T>& p) {
  const int64_t V = p.vocab;
  parallel(launch, p.rows, grain_of(V), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T* logits = p.logits + b * V;                                           // [V]
      T* direction = p.direction != nullptr ? p.direction + b * V : nullptr;  // [V]
      if (p.targets != nullptr && p.targets[b] < 0) {
        if (direction != nullptr) memset(direction, 0, V * sizeof(T));
        p.delta[b] = T(0);
        if (p.scale != nullptr) p.scale[b] = T(0);
        if (p.log_p != nullptr) p.log_p[b] = T(0);
        if (p.chosen != nullptr) p.chosen[b] = p.targets[b];
        continue;
      }
      if (p.kind == SignalKind::kEntropy) {
        const RowSoftmax<T> row = row_softmax<T, true>(logits, nullptr, V);
        const T log_sum = T(::log(row.sum));
        const T entropy = T(::log(row.sum) - row.weighted / row.sum);
        if (direction != nullptr)
          for_each_vector<T>(V, [&](int64_t j, int n) {
            const Vec<T> log_o = shifted(logits, j, n, row.maximum) - log_sum;
            store(direction + j, -exp<T>(log_o) * (log_o + entropy), n);
          });
        p.delta[b] = entropy;
        if (p.scale != nullptr) p.scale[b] = T(1);
        continue;
      }
      const bool open = p.kind == SignalKind::kSoftmax;
      const int64_t target = open ? 0 : p.targets != nullptr ? p.targets[b] : row_argmax(logits, V);
      const T target_logit = logits[target];
      const RowSoftmax<T> row = row_softmax<T, false>(logits, direction, V);
      if (direction != nullptr) {
        const T inverse = T(1 / row.sum);
        for_each_vector<T>(V, [&](int64_t j, int n) {
          store(direction + j, load(direction + j, n) * inverse, n);
        });
      }
      if (open) {
        p.delta[b] = T(double(row.maximum) + ::log(row.sum));
        continue;
      }
      const double log_p = row_log_p(row, target_logit);
      if (direction != nullptr) {
        direction[target] = T(::expm1(log_p));  // p - 1 without cancellation
      }
      const GoldSignal signal = gold_signal(p.kind, log_p);
      p.delta[b] = T(signal.delta);
      if (p.scale != nullptr) p.scale[b] = T(signal.scale);
      if (p.log_p != nullptr) p.log_p[b] = T(log_p);
      if (p.chosen != nullptr) p.chosen[b] = target;
    }
  });
}

template <typename T>
void gold_arrives(const Launch&, const GoldArrives<T>& p) {
  const int64_t H = p.hidden;
  for (int64_t b = 0; b < p.rows; ++b) {
    const int64_t target = p.targets[b];
    if (target < 0) {
      memset(p.dh + b * H, 0, H * sizeof(T));
      p.delta[b] = p.scale[b] = T(0);
      continue;
    }
    const double log_p = double(p.logits[b * p.vocab + target]) - double(p.log_sum[b]);
    const GoldSignal signal = gold_signal(p.kind, log_p);
    p.delta[b] = T(signal.delta);
    p.scale[b] = T(signal.scale);
    const T *w = p.weight + target * H, *expected = p.expected + b * H;
    for_each_vector<T>(H, [&](int64_t j, int n) {
      store(p.dh + b * H + j, load(expected + j, n) - load(w + j, n), n);
    });
  }
}

template <typename T>
FR_INLINE T row_dot(const T* x, const T* y, int64_t V) {
  T total = T(0);
  for (int64_t start = 0; start < V; start += kSumBlock) {
    const int64_t size = V - start < kSumBlock ? V - start : kSumBlock;
    Vec<T> part{};
    for_each_vector<T>(
        size, [&](int64_t j, int n) { part += load(x + start + j, n) * load(y + start + j, n); });
    total += sum<T>(part);
  }
  return total;
}

template <typename T>
void softmax_signal_backward(const Launch& launch, const SoftmaxSignalBackward<T>& p) {
  const int64_t V = p.vocab;
  parallel(launch, p.rows, grain_of(V), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T* logits = p.logits + b * V;  // [V]
      T* bar = p.u_bar + b * V;      // [V] in: cotangent of u; out: of the logits
      T* u = p.u + b * V;            // [V]
      const T delta_bar = p.delta_bar != nullptr ? p.delta_bar[b] : T(0);
      const T loss_bar = p.loss_bar != nullptr ? p.loss_bar[b] : T(0);
      if (p.targets != nullptr && p.targets[b] < 0) {
        memset(bar, 0, V * sizeof(T));
        memset(u, 0, V * sizeof(T));
        continue;
      }
      if (p.kind == SignalKind::kEntropy) {
        const RowSoftmax<T> row = row_softmax<T, true>(logits, nullptr, V);
        const T log_sum = T(::log(row.sum));
        const T entropy = T(::log(row.sum) - row.weighted / row.sum);
        T mean_bar = T(0), dot = T(0);  // <o, bar>, <u, bar>
        for (int64_t start = 0; start < V; start += kSumBlock) {
          const int64_t size = V - start < kSumBlock ? V - start : kSumBlock;
          Vec<T> part_mean{}, part_dot{};
          for_each_vector<T>(size, [&](int64_t k, int n) {
            const int64_t j = start + k;
            const Vec<T> log_o = shifted(logits, j, n, row.maximum) - log_sum;
            const Vec<T> o_bar = exp<T>(log_o) * load(bar + j, n);
            part_mean += o_bar;
            part_dot -= o_bar * (log_o + entropy);
          });
          mean_bar += sum<T>(part_mean);
          dot += sum<T>(part_dot);
        }
        for_each_vector<T>(V, [&](int64_t j, int n) {
          const Vec<T> log_o = shifted(logits, j, n, row.maximum) - log_sum;
          const Vec<T> o = exp<T>(log_o);
          const Vec<T> u_j = -o * (log_o + entropy);
          const Vec<T> l_bar =
              (load(bar + j, n) - mean_bar) * (u_j - o) - o * dot + delta_bar * u_j;
          store(bar + j, l_bar, n);
          store(u + j, u_j, n);
        });
        continue;
      }
      const int64_t target = p.targets != nullptr ? p.targets[b] : row_argmax(logits, V);
      const T target_logit = logits[target];
      const RowSoftmax<T> row = row_softmax<T, false>(logits, u, V);
      const double log_p = row_log_p(row, target_logit);
      const T inverse = T(1 / row.sum);
      const GoldSignal signal = gold_signal(p.kind, log_p);
      const T scale = T(signal.scale);
      const T mean_bar = row_dot(u, bar, V) * inverse;  // <o, bar>
      const T along = mean_bar - bar[target];           // <o - onehot, bar>
      // d(log p)/d(l) = onehot - o = -direction
      const T on_direction = T(loss_bar + delta_bar * signal.scale - along * signal.scale_slope);
      const T p_minus_1 = T(::expm1(log_p));
      const T target_bar =
          scale * (p_minus_1 + T(1)) * (bar[target] - mean_bar) + on_direction * p_minus_1;
      for_each_vector<T>(V, [&](int64_t j, int n) {
        const Vec<T> o = load(u + j, n) * inverse;
        store(bar + j, o * (scale * (load(bar + j, n) - mean_bar) + on_direction), n);
        store(u + j, o * scale, n);
      });
      bar[target] = target_bar;
      u[target] = scale * p_minus_1;
    }
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
