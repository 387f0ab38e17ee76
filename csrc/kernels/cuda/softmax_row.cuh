// The softmax of a row of logits [V] and sums weighted with it, in one pass over memory (online:
// relative to the maximum so far). Used by softmax_signal.cuh and softmax_signal_backward.cuh.
//
// A row has a block of its own, or, where a few rows of a large vocabulary would leave most of the
// GPU idle, several blocks: then softmax_scan_kernel leaves one partial result per block in memory
// and the next launch combines them.
#pragma once

#include <type_traits>

#include "../kernels.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace fused_recoder {
namespace cuda {

constexpr int kRowThreads = 32 * kMaxWarps;
constexpr int kWidth = 8;  // columns a thread loads at once: 16 bytes of halves, 32 of floats

// Blocks per multiprocessor to leave registers for: without a number ptxas aims high and spills.
template <typename A, int kWeights>
constexpr int kRowBlocks = sizeof(A) == 4 && kWeights == 1 ? 2 : 1;

// ---- Columns: what a block visits -------------------------------------------------------------

// [begin, end) of a row; [body, tail) starts at an aligned address and is a multiple of kWidth.
struct Columns {
  int begin, body, tail, end;
};

template <typename T>
__device__ __forceinline__ int phase(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kWidth);
}

// `phases_agree`: all arrays that are visited are aligned at the same columns.
template <typename T>
__device__ __forceinline__ Columns columns_of(int begin, int end, const T* row, bool phases_agree) {
  const int lead = (2 * kWidth - phase(row) - begin % kWidth) % kWidth;
  const int body = phases_agree ? min(begin + lead, end) : end;
  return {begin, body, body + (end - body) / kWidth * kWidth, end};
}

// Calls body(column, width) for all columns, several at a time where they are aligned.
template <typename Body>
__device__ __forceinline__ void for_columns(const Columns& columns, const Body& body) {
  for (int j = columns.body + kWidth * threadIdx.x; j < columns.tail; j += kWidth * blockDim.x)
    body(j, Constant<kWidth>());
  const int lead = columns.body - columns.begin, rest = lead + columns.end - columns.tail;
  for (int i = threadIdx.x; i < rest; i += blockDim.x)
    body(i < lead ? columns.begin + i : columns.tail + i - lead, Constant<1>());
}

// ---- What a pass collects ---------------------------------------------------------------------

// x = logit - maximum, kept finite: 0 * (-inf) would be NaN where the limit is 0. Far below the
// smallest argument whose exponential is not 0, also of a fraction of it. (A NaN is not below
// anything and stays.)
template <typename A>
__device__ __forceinline__ A shifted(A logit, A maximum) {
  constexpr A kFloor = A(-1e30);
  const A x = logit - maximum;
  return logit == A(-INFINITY) || x < kFloor ? kFloor : x;
}

template <typename A>
struct DeviceMath {
  using Number = A;
  __device__ __forceinline__ A exp(A x) const { return ::exp(x); }
  __device__ __forceinline__ A tanh(A x) const { return ::tanh(x); }
};

// sums[w][0] is the sum of weight_w * exp(x), sums[w][1], for signals that have two, that of
// weight_w * t(x): kernels/row_signals.h. Weight 0 is 1, weight 1 comes from memory.
template <typename A, int kWeights, int kSums>
struct RowState {
  A maximum;
  int argmax;  // the first column that has the maximum
  A sums[kWeights][kSums];
};

constexpr int kNoColumn = INT32_MAX;

template <typename A, int kWeights, int kSums>
__device__ __forceinline__ RowState<A, kWeights, kSums> empty_row() {
  return {A(-INFINITY), kNoColumn, {}};
}

template <typename Signal, typename A, int kWeights, int kSums>
__device__ __forceinline__ void raise_maximum(const Signal& signal,
                                              RowState<A, kWeights, kSums>& state, A maximum) {
  static_assert(kSums == Signal::kSums);
  const auto rise = signal.rise(shifted(state.maximum, maximum), DeviceMath<A>());
#pragma unroll
  for (int w = 0; w < kWeights; ++w) {
    if constexpr (kSums == 2) state.sums[w][1] = rise.second(state.sums[w][1], state.sums[w][0]);
    state.sums[w][0] *= rise.factor;
  }
  state.maximum = maximum;
}

// Columns j .. j + N - 1; their weights [kWeights][N] with the ones in front.
template <int N, typename Signal, typename A, int kWeights, int kSums>
__device__ __forceinline__ void add_columns(const Signal& signal,
                                            RowState<A, kWeights, kSums>& state, int j,
                                            const A (&logits)[N], const A (&weights)[kWeights][N]) {
  A largest = logits[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = fmax(largest, logits[i]);  // ignores NaN
  if (largest >= state.maximum) {
    int first = kNoColumn;
#pragma unroll
    for (int i = N - 1; i >= 0; --i)
      if (logits[i] == largest) first = j + i;
    if (largest > state.maximum || first < state.argmax) state.argmax = first;
    raise_maximum(signal, state, largest);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const A x = shifted(logits[i], state.maximum), e = exp(x);
#pragma unroll
    for (int w = 0; w < kWeights; ++w) {
      state.sums[w][0] += weights[w][i] * e;
      if constexpr (kSums == 2) {
        const auto t = signal.summand(x, e, DeviceMath<A>());
        state.sums[w][1] += weights[w][i] * t.weight * t.value;
      }
    }
  }
}

// ---- The input rows ---------------------------------------------------------------------------

template <typename A>
struct LogitRows {
  int vocab;
  const A* logits;         // [B,V]
  const A* weights;        // [B,V], null with one weight
  const int64_t* targets;  // [B] or null: the most probable token
};

template <int kWeights, typename Signal, typename A>
__device__ __forceinline__ RowState<A, kWeights, Signal::kSums> scan_columns(const Signal& signal,
                                                                             const LogitRows<A>& in,
                                                                             int64_t row, int begin,
                                                                             int end) {
  const A* logits = in.logits + row * in.vocab;  // [V]
  const A* weights = kWeights > 1 ? in.weights + row * in.vocab : logits;
  auto state = empty_row<A, kWeights, Signal::kSums>();
  const bool phases_agree = phase(weights) == phase(logits);
  for_columns(columns_of(begin, end, logits, phases_agree), [&](int j, auto width) {
    constexpr int N = decltype(width)::value;
    A l[N], w[kWeights][N];
    load<N>(l, logits + j);
    if (kWeights > 1) load<N>(w[kWeights - 1], weights + j);
#pragma unroll
    for (int i = 0; i < N; ++i) w[0][i] = A(1);
    add_columns(signal, state, j, l, w);
  });
  return state;
}

// ---- Combining the threads of a block ---------------------------------------------------------

template <typename A, int kWeights, int kSums>
struct RowSlots {  // shared memory
  A maxima[kMaxWarps];
  A sums[kMaxWarps][kWeights][kSums];
  int argmax[kMaxWarps];
};

// The same for the whole block.
template <typename A, int kWeights, int kSums>
struct RowTotals {
  A maximum;
  int argmax;
  double sums[kWeights][kSums];
};

struct Largest {
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return fmax(a, b);
  }
};

struct Smallest {
  __device__ __forceinline__ int operator()(int a, int b) const { return min(a, b); }
};

// The totals are valid in thread 0.
template <typename Signal, typename A, int kWeights, int kSums>
__device__ __forceinline__ RowTotals<A, kWeights, kSums> combine_threads(
    const Signal& signal, RowState<A, kWeights, kSums> state, RowSlots<A, kWeights, kSums>& slots) {
  const int warp = threadIdx.x / 32;
  const bool first_lane = threadIdx.x % 32 == 0;
  const A warp_maximum = reduce_warp(state.maximum, Largest());
  if (first_lane) slots.maxima[warp] = warp_maximum;
  __syncthreads();
  A maximum = A(-INFINITY);
  for (int i = 0; i < warp_count(); ++i) maximum = fmax(maximum, slots.maxima[i]);

  if (state.maximum < maximum) state.argmax = kNoColumn;
  raise_maximum(signal, state, maximum);
  const int argmax = reduce_warp(state.argmax, Smallest());
  if (first_lane) slots.argmax[warp] = argmax;
#pragma unroll
  for (int w = 0; w < kWeights; ++w)
#pragma unroll
    for (int m = 0; m < kSums; ++m) {
      const A sum = reduce_warp(state.sums[w][m], Add());
      if (first_lane) slots.sums[warp][w][m] = sum;
    }
  __syncthreads();
  RowTotals<A, kWeights, kSums> totals{maximum, kNoColumn, {}};
  if (threadIdx.x == 0)
    for (int i = 0; i < warp_count(); ++i) {
      totals.argmax = min(totals.argmax, slots.argmax[i]);
      for (int w = 0; w < kWeights; ++w)
        for (int m = 0; m < kSums; ++m) totals.sums[w][m] += slots.sums[i][w][m];
    }
  if (totals.argmax == kNoColumn) totals.argmax = 0;  // a row of NaN
  return totals;
}

// ---- Rows that are split over blocks ----------------------------------------------------------

// The share of one block, and what stands at the target if that is one of its columns: the target
// may be overwritten by its block before another one has read it.
template <typename A, int kWeights, int kSums>
struct Partial {
  RowState<A, kWeights, kSums> state;
  A target_logit, target_weight;
};

// Block y of a row has columns [y * columns, (y + 1) * columns).
struct RowSplit {
  int blocks, columns;
  void* partials;  // [B,blocks] of Partial; null: one block per row

  __device__ __forceinline__ int begin(int vocab) const {
    return min(static_cast<int>(blockIdx.y) * columns, vocab);
  }
  __device__ __forceinline__ int end(int vocab) const {
    return min(static_cast<int>(blockIdx.y + 1) * columns, vocab);
  }
};

// What stands at the target of a row. Called by one thread.
template <typename A>
struct Target {
  int column;
  A logit, weight;
};

template <typename A>
__device__ __forceinline__ bool is_ignored(const LogitRows<A>& in, int64_t row) {
  return in.targets != nullptr && in.targets[row] < 0;
}

template <typename A>
__device__ __forceinline__ int target_column(const LogitRows<A>& in, int64_t row, int argmax) {
  if (in.targets == nullptr) return argmax;
  const int64_t target = in.targets[row];
  DEVICE_ASSERT(target < in.vocab && "target out of range");
  return static_cast<int>(target);
}

// The shares of all blocks of all rows. Grid: x = rows, y = split.blocks.
template <typename A, int kWeights, typename Signal>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<A, kWeights>)
    softmax_scan_kernel(const LogitRows<A> in, const Signal signal, const RowSplit split) {
  constexpr int kSums = Signal::kSums;
  __shared__ RowSlots<A, kWeights, kSums> slots;
  const int64_t row = blockIdx.x;
  const int begin = split.begin(in.vocab), end = split.end(in.vocab);
  if (!is_ignored(in, row)) {
    const RowTotals<A, kWeights, kSums> totals =
        combine_threads(signal, scan_columns<kWeights>(signal, in, row, begin, end), slots);
    if (threadIdx.x == 0) {
      Partial<A, kWeights, kSums> partial{};
      partial.state.maximum = totals.maximum;
      partial.state.argmax = totals.argmax;
      for (int w = 0; w < kWeights; ++w)
        for (int m = 0; m < kSums; ++m)
          partial.state.sums[w][m] = static_cast<A>(totals.sums[w][m]);
      const int column = target_column(in, row, totals.argmax);
      if (column >= begin && column < end) {
        partial.target_logit = in.logits[row * in.vocab + column];
        if (kWeights > 1) partial.target_weight = in.weights[row * in.vocab + column];
      }
      static_cast<Partial<A, kWeights, kSums>*>(split.partials)[row * split.blocks + blockIdx.y] =
          partial;
    }
  }
}

// The state of a thread before combine_threads: a scan of the row, or its share of the partials.
template <int kWeights, typename Signal, typename A>
__device__ __forceinline__ RowState<A, kWeights, Signal::kSums> scan_or_collect(
    const Signal& signal, const LogitRows<A>& in, const RowSplit& split, int64_t row) {
  constexpr int kSums = Signal::kSums;
  if (split.partials == nullptr) return scan_columns<kWeights>(signal, in, row, 0, in.vocab);
  const auto* partials =
      static_cast<const Partial<A, kWeights, kSums>*>(split.partials) + row * split.blocks;
  RowState<A, kWeights, kSums> state = empty_row<A, kWeights, kSums>();
  for (int i = threadIdx.x; i < split.blocks; i += blockDim.x) {
    RowState<A, kWeights, kSums> other = partials[i].state;
    if (other.maximum > state.maximum) {
      state.argmax = other.argmax;
      raise_maximum(signal, state, other.maximum);
    } else {
      raise_maximum(signal, other, state.maximum);
    }
    for (int w = 0; w < kWeights; ++w)
      for (int m = 0; m < kSums; ++m) state.sums[w][m] += other.sums[w][m];
  }
  return state;
}

template <typename A, int kWeights, int kSums>
__device__ __forceinline__ Target<A> find_target(const LogitRows<A>& in, const RowSplit& split,
                                                 int64_t row, int argmax) {
  const int column = target_column(in, row, argmax);
  if (split.partials == nullptr)
    return {column, in.logits[row * in.vocab + column],
            kWeights > 1 ? in.weights[row * in.vocab + column] : A(0)};
  const auto& partial = static_cast<const Partial<A, kWeights, kSums>*>(
      split.partials)[row * split.blocks + column / split.columns];
  return {column, partial.target_logit, partial.target_weight};
}

// ---- The plan of a launch ---------------------------------------------------------------------

struct RowPlan {
  int threads, blocks_per_row;
};

// A second launch costs a few microseconds, in which one block reads some 64k floats.
constexpr int64_t kColumnsPerBlock = 16384;
constexpr int64_t kEnoughBlocks = 128;  // to fill a GPU

// Of a block that has so many columns.
inline int row_threads(int64_t columns) {
  const int64_t warps = (columns / kWidth + 31) / 32;
  return static_cast<int>(32 * (warps < 1 ? 1 : warps < kMaxWarps ? warps : kMaxWarps));
}

inline RowPlan plan_rows(int64_t rows, int64_t vocab) {
  const int64_t wanted = vocab / kColumnsPerBlock, allowed = kEnoughBlocks / rows;
  const int64_t blocks = wanted < allowed ? wanted : allowed;
  if (blocks <= 1) return {row_threads(vocab), 1};
  return {row_threads((vocab + blocks - 1) / blocks), static_cast<int>(blocks)};
}

inline RowSplit split_rows(int64_t vocab, const RowPlan& plan, void* scratch) {
  if (plan.blocks_per_row == 1) return {1, static_cast<int>(vocab), nullptr};
  const int64_t columns = (vocab + plan.blocks_per_row - 1) / plan.blocks_per_row;
  return {plan.blocks_per_row, static_cast<int>(columns), scratch};
}

template <typename A>
constexpr int64_t kPartialBytes = sizeof(Partial<A, 2, 2>);  // the largest there is

// Bytes; 0 where no row is split.
template <typename A>
int64_t softmax_scratch(int64_t rows, int64_t vocab) {
  const int64_t blocks = plan_rows(rows, vocab).blocks_per_row;
  return blocks > 1 ? rows * blocks * kPartialBytes<A> : 0;
}

}  // namespace cuda
}  // namespace fused_recoder
