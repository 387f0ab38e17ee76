// The mean of K predictions: its entropy, and the masks that make K predictions out of one state.
// Structs: kernels/kernels.h.
#pragma once

#include "softmax_signal.h"

namespace fused_recoder {
namespace FR_ISA {

template <typename T>
void mixture_signal(const Launch& launch, const MixtureSignal<T>& p) {
  const int64_t V = p.vocab, K = p.samples;
  const int64_t stride = p.rows * V;  // from one sample's row to the next one's
  parallel(launch, p.rows, grain_of(K * V), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T* rows = p.logits + b * V;        // K rows [V], `stride` apart: logits, then exp(l - max)
      T* log_mean = p.log_mean + b * V;  // [V] first the mean
      for (int64_t k = 0; k < K; ++k) {
        T* row = rows + k * stride;
        if (p.common != nullptr) {
          const T* common = p.common + b * p.common_stride;
          for_each_vector<T>(V, [&](int64_t j, int n) {
            store(row + j, load(row + j, n) + load(common + j, n), n);
          });
        }
        const RowSoftmax<T> softmax = row_softmax(OneSum(), row, row, V);
        const T inverse = T(1 / softmax.sum), share = T(1.0 / K);
        for_each_vector<T>(V, [&](int64_t j, int n) {
          const Vec<T> o = load(row + j, n) * inverse;
          store(row + j, o, n);
          store(log_mean + j, k == 0 ? o * share : load(log_mean + j, n) + o * share, n);
        });
      }
      double entropy = 0;
      for (int64_t start = 0; start < V; start += kSumBlock) {
        const int64_t size = V - start < kSumBlock ? V - start : kSumBlock;
        Vec<T> part{};
        for_each_vector<T>(size, [&](int64_t k, int n) {
          const int64_t j = start + k;
          const Vec<T> m = load(log_mean + j, n);
          // Where the mean underflows its share of everything below is 0, not 0 * -inf.
          const Vec<T> log_m = m >= Simd<T>::kSmallest ? log<T>(m) : m * T(0);
          part += m * log_m;
          store(log_mean + j, log_m, n);
        });
        entropy -= sum<T>(part);
      }
      p.delta[b] = T(entropy);
      if (p.direction == nullptr) continue;
      for (int64_t k = 0; k < K; ++k) {
        const T* o = rows + k * stride;
        T* u = p.direction + (k * p.rows + b) * V;
        T* sum = p.direction_sum != nullptr ? p.direction_sum + b * V : nullptr;
        const T mean = row_dot(o, log_mean, V);
        const T share = T(-1.0 / K);
        for_each_vector<T>(V, [&](int64_t j, int n) {
          const Vec<T> u_k = share * load(o + j, n) * (load(log_mean + j, n) - mean);
          store(u + j, u_k, n);
          if (sum != nullptr) store(sum + j, k == 0 ? u_k : load(sum + j, n) + u_k, n);
        });
      }
    }
  });
}

// With bar_k = d(l_k) this is the derivative of all u_k along d(l): the Hessian is symmetric.
//   d(o_k) = o_k (bar_k - <o_k, bar_k>),  slope = d(log m) = mean_k d(o_k) / m
template <typename T>
void mixture_signal_backward(const Launch& launch, const MixtureSignalBackward<T>& p) {
  const int64_t V = p.vocab, K = p.samples;
  const int64_t stride = p.rows * V;
  const T share = T(1.0 / K);
  parallel(launch, p.rows, grain_of(2 * K * V), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T *log_mean = p.log_mean + b * V, *slope = p.slope + b * V;  // [V] first m and d(m)
      for (int64_t k = 0; k < K; ++k) {
        T *o = p.logits + k * stride + b * V, *bar = p.u_bar + k * stride + b * V;  // [V]
        const T inverse = T(1 / row_softmax(OneSum(), o, o, V).sum);
        const T mean_bar = row_dot(o, bar, V) * inverse;
        for_each_vector<T>(V, [&](int64_t j, int n) {
          const Vec<T> o_j = load(o + j, n) * inverse, along = load(bar + j, n) - mean_bar;
          store(o + j, o_j, n);
          store(bar + j, along, n);
          const Vec<T> m = o_j * share, dm = o_j * along * share;
          store(log_mean + j, k == 0 ? m : load(log_mean + j, n) + m, n);
          store(slope + j, k == 0 ? dm : load(slope + j, n) + dm, n);
        });
      }
      for_each_vector<T>(V, [&](int64_t j, int n) {
        const Vec<T> m = load(log_mean + j, n);
        const auto counts = m >= Simd<T>::kSmallest;
        store(log_mean + j, counts ? log<T>(m) : m * T(0), n);
        store(slope + j, counts ? load(slope + j, n) / m : m * T(0), n);
      });
      for (int64_t k = 0; k < K; ++k) {
        T *o = p.logits + k * stride + b * V, *bar = p.u_bar + k * stride + b * V;  // [V]
        const T mean_log = row_dot(o, log_mean, V);
        T mean_change = row_dot(o, slope, V);  // of d(<o_k, log m>)
        for (int64_t start = 0; start < V; start += kSumBlock) {
          const int64_t size = V - start < kSumBlock ? V - start : kSumBlock;
          Vec<T> part{};
          for_each_vector<T>(size, [&](int64_t i, int n) {
            const int64_t j = start + i;
            part += load(o + j, n) * load(bar + j, n) * load(log_mean + j, n);
          });
          mean_change += sum<T>(part);
        }
        for_each_vector<T>(V, [&](int64_t j, int n) {
          const Vec<T> weight = -share * load(o + j, n);
          const Vec<T> centred = load(log_mean + j, n) - mean_log;
          store(bar + j, weight * (load(bar + j, n) * centred + load(slope + j, n) - mean_change),
                n);
          store(o + j, weight * centred, n);
        });
      }
    }
  });
}

template <typename T>
void mask_rows(const Launch& launch, const MaskRows<T>& p) {
  const int64_t H = p.units;
  parallel(launch, p.samples * p.rows, grain_of(8 * H), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint32_t k = static_cast<uint32_t>(r / p.rows);
      const uint32_t b = static_cast<uint32_t>(r % p.rows);
      const T* in = p.in + b * H;
      T* out = p.out + r * H;
      for_each_vector<T>(H, [&](int64_t j, int n) {
        const Vec<T> factor = dropout_factor<T>(p.dropout, p.time, p.first_row + (p.shared ? 0 : b),
                                                j, p.first_sample + k);
        store(out + j, load(in + j, n) * factor, n);
      });
    }
  });
}

template <typename T>
void mask_sum(const Launch& launch, const MaskSum<T>& p) {
  const int64_t H = p.units;
  parallel(launch, p.rows, grain_of(8 * H * p.samples), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      T* out = p.out + b * H;  // [H]
      memset(out, 0, H * sizeof(T));
      for (int64_t k = 0; k < p.samples; ++k) {
        const T* in = p.in + (k * p.rows + b) * H;  // [H]
        for_each_vector<T>(H, [&](int64_t j, int n) {
          const Vec<T> factor = dropout_factor<T>(
              p.dropout, p.time, static_cast<uint32_t>(p.first_row + (p.shared ? 0 : b)), j,
              static_cast<uint32_t>(k));
          store(out + j, load(out + j, n) + load(in + j, n) * factor, n);
        });
      }
    }
  });
}

}  // namespace FR_ISA
}  // namespace fused_recoder
