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
  double sum;     // Z and T of kernels/row_signals.h
  double second;  // where the signal has one
};

// The elementary functions that signals ask for: of vectors, and of single numbers in double.
template <typename T>
struct VectorMath {
  using Number = T;
  FR_INLINE Vec<T> exp(Vec<T> x) const { return FR_ISA::exp<T>(x); }
  FR_INLINE Vec<T> tanh(Vec<T> x) const { return FR_ISA::tanh<T>(x); }
};
template <typename T>
struct NumberMath {
  using Number = T;
  FR_INLINE T exp(T x) const { return T(::exp(double(x))); }
  FR_INLINE T tanh(T x) const { return T(::tanh(double(x))); }
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

// The first n lanes; 0 behind them.
template <typename T>
FR_INLINE Vec<T> first_lanes(Vec<T> v, int n) {
  if (n == kLanes<T>) return v;
  T lanes[kLanes<T>] = {};
  store(lanes, v, n);
  return load(lanes);
}

// Writes exp(l - maximum) to `exps` unless it is null; it may be the memory of `logits`.
template <typename T, typename Signal>
FR_INLINE RowSoftmax<T> row_softmax(const Signal& signal, const T* logits, T* exps, int64_t V) {
  RowSoftmax<T> row{row_maximum(logits, V), 0, 0};
  for (int64_t start = 0; start < V; start += kSumBlock) {
    const int64_t size = V - start < kSumBlock ? V - start : kSumBlock;
    Vec<T> total{}, second{};
    for_each_vector<T>(size, [&](int64_t j, int n) {
      const Vec<T> x = shifted(logits, start + j, n, row.maximum);
      const Vec<T> e = first_lanes<T>(exp<T>(x), n);
      total += e;
      if constexpr (Signal::kSums == 2) {
        const auto t = signal.summand(x, e, VectorMath<T>());
        second += first_lanes<T>(t.weight, n) * t.value;
      }
      if (exps != nullptr) store(exps + start + j, e, n);
    });
    row.sum += sum<T>(total);
    row.second += sum<T>(second);
  }
  return row;
}

template <typename T>
FR_INLINE void multiply_by(T factor, T* x, int64_t size) {
  for_each_vector<T>(size, [&](int64_t j, int n) { store(x + j, load(x + j, n) * factor, n); });
}

// log p of a token. Scalars of a row are computed in double: an error there would be common to the
// whole row, and cost next to nothing.
template <typename T>
FR_INLINE double row_log_p(const RowSoftmax<T>& row, T logit) {
  return (double(logit) - double(row.maximum)) - ::log(row.sum);
}

// A word of a row with this largest logit and log-sum-exp above it: y is log o.
template <typename T>
FR_INLINE Word<Vec<T>> word_at(const T* logits, int64_t j, int n, T maximum, T log_sum) {
  const Vec<T> x = shifted(logits, j, n, maximum), log_o = x - log_sum;
  return {x, log_o, exp<T>(log_o)};
}

// No signal: the target is to be ignored. StreamDecode and SoftmaxSignal have these in common.
template <typename T, typename Outputs>
FR_INLINE void ignore_row(const Outputs& p, int64_t b) {
  if (p.direction != nullptr) memset(p.direction + b * p.vocab, 0, p.vocab * sizeof(T));
  p.delta[b] = T(0);
  if (p.scale != nullptr) p.scale[b] = T(0);
  if (p.log_p != nullptr) p.log_p[b] = T(0);
  if (p.chosen != nullptr) p.chosen[b] = p.targets[b];
}

template <typename T, typename Outputs>
FR_INLINE void write_gold_values(const Outputs& p, int64_t b, int64_t target, double log_p) {
  const GoldSignal signal = gold_signal(p.signal.kind, log_p);
  p.delta[b] = T(signal.delta);
  if (p.scale != nullptr) p.scale[b] = T(signal.scale);
  if (p.log_p != nullptr) p.log_p[b] = T(log_p);
  if (p.chosen != nullptr) p.chosen[b] = target;
}

template <typename T>
FR_INLINE void signal_of_row(const OneToken& token, const SoftmaxSignal<T>& p, int64_t b) {
  const int64_t V = p.vocab;
  T* logits = p.logits + b * V;                                           // [V]
  T* direction = p.direction != nullptr ? p.direction + b * V : nullptr;  // [V]
  const int64_t target = token.is_open()        ? 0
                         : p.targets != nullptr ? p.targets[b]
                                                : row_argmax(logits, V);
  const T target_logit = logits[target];
  const RowSoftmax<T> row = row_softmax(token, logits, direction, V);
  if (direction != nullptr) multiply_by(T(1 / row.sum), direction, V);
  if (token.is_open()) {
    p.delta[b] = T(double(row.maximum) + ::log(row.sum));
    return;
  }
  const double log_p = row_log_p(row, target_logit);
  if (direction != nullptr) direction[target] = T(::expm1(log_p));  // p - 1 without cancellation
  write_gold_values<T>(p, b, target, log_p);
}

template <typename T, typename Signal>
FR_INLINE void signal_of_row(const Signal& signal, const SoftmaxSignal<T>& p, int64_t b) {
  const T* logits = p.logits + b * p.vocab;  // [V]
  const RowSoftmax<T> row = row_softmax(signal, logits, static_cast<T*>(nullptr), p.vocab);
  const double mean = row.second / row.sum, log_sum = ::log(row.sum);
  p.delta[b] = T(signal.delta(row.sum, mean));
  if (p.scale != nullptr) p.scale[b] = T(1);
  if (p.direction == nullptr) return;
  T* direction = p.direction + b * p.vocab;  // [V]
  const auto common = signal.template row<T>(row.sum, mean, log_sum);
  for_each_vector<T>(p.vocab, [&](int64_t j, int n) {
    const Word<Vec<T>> word = word_at(logits, j, n, row.maximum, T(log_sum));
    store(direction + j, common.along(word, splat<T>(T(1)), VectorMath<T>()), n);
  });
}

template <typename T>
void softmax_signal(const Launch& launch, const SoftmaxSignal<T>& p) {
  with_row_signal(p.signal, [&](const auto& signal) {
    parallel(launch, p.rows, grain_of(p.vocab), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        if (p.targets != nullptr && p.targets[b] < 0)
          ignore_row<T>(p, b);
        else
          signal_of_row(signal, p, b);
      }
    });
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
    const GoldSignal signal = gold_signal(p.signal.kind, log_p);
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

// What the backward pass is given of a row.
template <typename T>
struct RowBar {
  T *logits, *bar, *u;  // [V]; bar in: cotangent of u; out: of the logits
  T delta_bar, loss_bar;

  RowBar(const SoftmaxSignalBackward<T>& p, int64_t b)
      : logits(p.logits + b * p.vocab),
        bar(p.u_bar + b * p.vocab),
        u(p.u + b * p.vocab),
        delta_bar(p.delta_bar != nullptr ? p.delta_bar[b] : T(0)),
        loss_bar(p.loss_bar != nullptr ? p.loss_bar[b] : T(0)) {}
};

template <typename T>
FR_INLINE void differentiate_row(const OneToken& token, const SoftmaxSignalBackward<T>& p,
                                 int64_t b) {
  const int64_t V = p.vocab;
  const auto [logits, bar, u, delta_bar, loss_bar] = RowBar<T>(p, b);
  const int64_t target = p.targets != nullptr ? p.targets[b] : row_argmax(logits, V);
  const T target_logit = logits[target];
  const RowSoftmax<T> row = row_softmax(token, logits, u, V);
  const double log_p = row_log_p(row, target_logit);
  const T inverse = T(1 / row.sum);
  const GoldSignal signal = gold_signal(token.kind, log_p);
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

template <typename T, typename Signal>
FR_INLINE void differentiate_row(const Signal& signal, const SoftmaxSignalBackward<T>& p,
                                 int64_t b) {
  const int64_t V = p.vocab;
  const RowBar<T> r(p, b);
  const RowSoftmax<T> row = row_softmax(signal, r.logits, static_cast<T*>(nullptr), V);
  const double origin = ::log(row.sum);
  const T log_sum = T(origin);
  const auto common = signal.template row<T>(row.sum, row.second / row.sum, origin);
  T mean_bar = T(0), dot = T(0);  // <o, bar>, <u, bar>
  for (int64_t start = 0; start < V; start += kSumBlock) {
    const int64_t size = V - start < kSumBlock ? V - start : kSumBlock;
    Vec<T> part_mean{}, part_dot{};
    for_each_vector<T>(size, [&](int64_t k, int n) {
      const int64_t j = start + k;
      const Word<Vec<T>> word = word_at(r.logits, j, n, row.maximum, log_sum);
      const Vec<T> bar = load(r.bar + j, n);
      part_mean += word.o * bar;
      part_dot += common.along(word, bar, VectorMath<T>());
    });
    mean_bar += sum<T>(part_mean);
    dot += sum<T>(part_dot);
  }
  for_each_vector<T>(V, [&](int64_t j, int n) {
    const Word<Vec<T>> word = word_at(r.logits, j, n, row.maximum, log_sum);
    const Vec<T> u_j = common.along(word, splat<T>(T(1)), VectorMath<T>());
    const Vec<T> centred = load(r.bar + j, n) - mean_bar;
    store(r.bar + j, common.cotangent(u_j, word.o, centred, dot, r.delta_bar), n);
    store(r.u + j, u_j, n);
  });
}

template <typename T>
void softmax_signal_backward(const Launch& launch, const SoftmaxSignalBackward<T>& p) {
  with_row_signal(p.signal, [&](const auto& signal) {
    parallel(launch, p.rows, grain_of(p.vocab), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        if (p.targets != nullptr && p.targets[b] < 0) {
          memset(p.u_bar + b * p.vocab, 0, p.vocab * sizeof(T));
          memset(p.u + b * p.vocab, 0, p.vocab * sizeof(T));
        } else {
          differentiate_row(signal, p, b);
        }
      }
    });
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
