// The kernel interface: one plain struct of pointers and sizes per kernel, and the table of
// functions that a backend fills in. No torch types. Called by csrc/engine only.
//
// Dimensions: B rows (batch), H hidden units, V vocabulary. Matrices are row-major and dense.
// Types: S is what GEMMs multiply (float, double; half and bfloat16 on CUDA), A what is
// accumulated and what states, softmax and losses are kept in (double for double, else float).
// "null" behind a pointer says that it may be absent.
#pragma once

#include "row_signals.h"

namespace fused_recoder {

template <typename S>
struct AccumulateIn {
  using type = float;
};
template <>
struct AccumulateIn<double> {
  using type = double;
};

// How a kernel runs. CPU kernels split their rows with `parallel_for` (at::parallel_for behind a
// plain function pointer); CUDA kernels are launched on `stream`.
struct Launch {
  using Body = void (*)(const void* context, int64_t begin, int64_t end);
  void (*parallel_for)(int64_t count, int64_t grain, Body body, const void* context);
  void* stream;
};

// LSTM cell of one layer and step. Rows with live == 0 (behind the end of a ragged sequence) keep
// their state and put out 0.
template <typename S>
struct CellForward {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, hidden;
  A* gates;             // [B,4H] in: pre-activations i,f,g,o with biases; out: activated
  const A* c_prev;      // [B,H] the recoded cell state of the step before
  const S* h_prev;      // [B,H] the recoded hidden state of the step before
  const uint8_t* live;  // [B] or null
  A* c;                 // [B,H] out
  S* h;                 // [B,H] out
  S* h_up;              // [B,H] out or null: what the layer above (or the decoder) sees
  Dropout dropout;      // applied to h_up
  uint32_t time;
};

// One pass over the logits of a step: log-sum-exp, the signal's value and its direction.
// u = scale * direction; direction is o - onehot(target) for the gold signals, u itself for those
// of the whole prediction.
template <typename S>
struct SoftmaxSignal {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, vocab;
  RowSignal signal;
  A* logits;               // [B,V] in; may be overwritten
  const int64_t* targets;  // [B] or null: the most probable token stands in; < 0: ignored row
  S* direction;            // [B,V] out or null (value only); may be the memory of `logits`
  A* delta;                // [B] out
  A* scale;                // [B] out or null
  A* log_p;                // [B] out or null: log probability of the target (0 where ignored)
  int64_t* chosen;         // [B] out or null: the target used
  void* scratch;           // softmax_scratch(rows, vocab) bytes; null: rows are not split (CUDA)
};

// Decoder, softmax, signal and d(signal)/d(h) of few rows in one pass over the decoder's weight.
// With `direction`: gold signals only.
template <typename S>
struct StreamDecode {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, hidden, vocab;
  RowSignal signal;
  const S* h;              // [B,H]
  const S* weight;         // [V,H]
  const A* bias;           // [V] or null
  const int64_t* targets;  // [B] or null, as in SoftmaxSignal
  A* scratch;              // stream_scratch(rows, hidden) elements
  A* logits;               // [B,V] out or null; with a direction: its memory
  S* direction;            // [B,V] out or null, as in SoftmaxSignal
  A* dh;                   // [B,H] out or null (value only): direction * W
  A* delta;                // [B] out
  A* scale;                // [B] out or null
  A* log_p;                // [B] out or null
  int64_t* chosen;         // [B] out or null
};

// The gold token arrives after the prediction: completes what kSoftmax left open.
template <typename S>
struct GoldArrives {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, hidden, vocab;
  RowSignal signal;
  const A* logits;         // [B,V]
  const A* log_sum;        // [B] log-sum-exp of the logits
  const A* expected;       // [B,H] o * W
  const int64_t* targets;  // [B]; < 0: ignored row
  const S* weight;         // [V,H]
  A* dh;                   // [B,H] out: expected - W[target]
  A* delta;                // [B] out
  A* scale;                // [B] out
};

// Entropy of the mean m of K predictions and its directions: u_k = -(1/K) o_k (log m - <o_k, log
// m>).
template <typename S>
struct MixtureSignal {
  using A = typename AccumulateIn<S>::type;
  int64_t samples, rows, vocab;
  A* logits;              // [K,B,V] in; overwritten
  S* direction;           // [K,B,V] out or null (value only): u_k; may be the memory of `logits`
  A* log_mean;            // [B,V] out: log m, 0 where m underflows
  A* delta;               // [B] out
  const A* common;        // [B,V] or null: what the logits of all samples share, not yet in them
  int64_t common_stride;  // from row to row of `common`; 0: one row [V] for all
  S* direction_sum;       // [B,V] out or null: sum of u_k
};

// The backward pass of SoftmaxSignal, for second derivatives: given the cotangents of delta and u,
// the cotangent of the logits.
template <typename S>
struct SoftmaxSignalBackward {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, vocab;
  RowSignal signal;
  A* logits;               // [B,V] in; overwritten with u where `u` is its memory
  const int64_t* targets;  // [B] or null
  const A* delta_bar;      // [B] or null: zero
  const A* loss_bar;       // [B] or null: gold signals, cotangent of the loss -log p
  A* u_bar;                // [B,V] in; out: the cotangent of the logits
  A* u;                    // [B,V] out, may be the memory of `logits`
  void* scratch;           // as in SoftmaxSignal
};

// The same for MixtureSignal: given the cotangents of the u_k, those of the logits.
template <typename S>
struct MixtureSignalBackward {
  using A = typename AccumulateIn<S>::type;
  int64_t samples, rows, vocab;
  A* logits;    // [K,B,V] in; out: u_k
  A* u_bar;     // [K,B,V] in; out: the cotangents of the logits
  A* log_mean;  // [B,V] scratch
  A* slope;     // [B,V] scratch: d(log m) along the cotangents
};

// Step sizes: alpha of row b is step[b * stride]; stride 0 shares one value.
template <typename A>
struct StepSize {
  const A* step;
  int64_t stride;
};

// Takes the recoding step of one layer: s' = s - alpha * d(delta)/d(s), and goes through the cell
// for the layer below. The gradient in h is row_scale * dropout mask * dh; that in c follows from
// it, unless it is given.
template <typename S>
struct Recode {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, hidden;
  const A* gates;      // [B,4H] activated
  const A* c_prev;     // [B,H]
  const A* c;          // [B,H] before recoding
  const S* h;          // [B,H] before recoding
  const A* dh;         // [B,H] see above; null: zero
  const A* dc;         // [B,H] or null: follows from dh
  const A* row_scale;  // [B] or null
  Dropout dropout;     // of the connection that `dh` came through
  uint32_t time;
  const uint8_t* active;  // [B] or null: rows to recode
  const uint8_t* live;    // [B] or null: rows inside their sequence
  StepSize<A> alpha_h;    // step null: h is not recoded, h_recoded is the memory of h
  StepSize<A> alpha_c;    // step null: c is not recoded, c_recoded is the memory of c
  S* h_recoded;           // [B,H] out
  A* c_recoded;           // [B,H] out
  S* h_up;                // [B,H] out or null: the recoded h after up_dropout, 0 in dead rows
  Dropout up_dropout;
  S* h_after;  // [B,H] out or null: the state that delta_after is the signal of
  S* dgates;   // [B,4H] out or null (bottom layer)
  A* grad_h;   // [B,H] out or null: kept for the gradient of the step size
  A* grad_c;   // [B,H] out or null
  A* norm_h;   // [B] out or null: trace
  A* norm_c;   // [B] out or null
};

// Backtracking: the state whose signal decides whether a step of length alpha is taken.
// trial = h - alpha_h g_h, or o * tanh(c - alpha_c g_c) if h is not recoded, after dropout.
template <typename S>
struct TrialStep {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, hidden;
  const A* gates;      // [B,4H] activated; for o
  const A* c;          // [B,H]
  const S* h;          // [B,H]
  const A* dh;         // [B,H], times row_scale and dropout mask the gradient in h
  const A* row_scale;  // [B] or null
  Dropout dropout;
  uint32_t time;
  bool recodes_h;
  const A* alpha;  // [B]
  S* trial;        // [B,H] out
};

// Rows whose trial lowered the signal keep their alpha, the others shrink it; on the last trial
// they get 0.
template <typename A>
struct TrialVerdict {
  int64_t samples, rows;
  const A* delta;        // [B]
  const A* trial_delta;  // [B]
  A shrink;              // 0 on the last trial
  uint8_t* settled;      // [B] in, out
  A* alpha;              // [K,B] in, out
};

// The backward pass of Recode, where the recoding gradient is not a constant (gradient="exact").
// Recoding went down the layers, so this goes up: from the cotangents of h' and c', and of what
// went to the layer below, to the cotangent of what came from above, and to those of everything
// that the gradient was made of. All are zero in rows that were not recoded.
template <typename S>
struct RecodeBackward {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, hidden;
  const A* gates;       // [B,4H] activated
  const A* c_prev;      // [B,H]
  const A* grad_h;      // [B,H] d(delta)/d(h), 0 in rows that were not recoded
  const A* dh_recoded;  // [B,H] cotangent of h'
  const A* dh_up;       // [B,H] or null: cotangent of h' after up_dropout
  const A* dc_recoded;  // [B,H] cotangent of c'
  const A* alpha_h;     // [B] or null: h is not recoded; 0 in rows that were not recoded
  const A* alpha_c;     // [B] or null
  const A* dgates_bar;  // [B,4H] or null (bottom layer): cotangent of what went below
  Dropout dropout;      // of the connection that the gradient came through
  Dropout up_dropout;
  uint32_t time;
  S* from_above_bar;  // [B,H] out: cotangent of the gradient before `dropout`
  S* h_signal;        // [B,H] out or null: h after `dropout`
  S* dgates;          // [B,4H] out or null (bottom layer): what went below
  A* gates_bar;       // [B,4H] out: to add to the cotangents of the pre-activations
  A* c_bar;           // [B,H] out: to add to that of c
  A* c_prev_bar;      // [B,H] out: to add to that of the previous c'
  A* step_bar_h;      // [B] out or null: cotangent of alpha_h
  A* step_bar_c;      // [B] out or null
};

// Back-propagation through one layer and step. The recoding gradient is a constant here; what it
// contributes otherwise comes from RecodeBackward.
template <typename S>
struct CellBackward {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, hidden;
  const A* gates;   // [B,4H] activated
  const A* c_prev;  // [B,H] recoded state of the step before
  const A* dh_up;   // [B,H] or null: cotangent of what went up (dropout applied here)
  Dropout dropout;
  uint32_t time;
  const A* dh_recoded;  // [B,H] or null: cotangent of h'
  A* dc;                // [B,H] in: cotangent of c'; out: that of the previous c'
  const A* dh_signal;   // [B,H] or null: more of the cotangent of h, through signal_dropout
  Dropout signal_dropout;
  const A* gates_bar;   // [B,4H] or null: of RecodeBackward
  const A* c_bar;       // [B,H] or null
  const A* c_prev_bar;  // [B,H] or null
  const uint8_t* live;  // [B] or null
  const A* grad_h;      // [B,H] or null
  const A* grad_c;      // [B,H] or null
  A* step_bar_h;        // [B] out or null: cotangent of alpha_h
  A* step_bar_c;        // [B] out or null
  bool up_is_recoded;   // what went up is h', not h: its cotangent counts for alpha_h
  S* dgates;            // [B,4H] out
  A* dh_prev;           // [B,H] out or null: cotangent that dead rows hand to the step before
};

// out[r, :] = factor of the dropout mask at (time, sample, row r)
template <typename A>
struct DropoutMask {
  int64_t rows, units;
  Dropout dropout;
  uint32_t time, sample;
  A* out;  // [B,units]
};

// Rows under K masks: out[k,b,:] = in[b,:] * factor(time, first_sample + k, first_row + b).
template <typename S>
struct MaskRows {
  int64_t samples, rows, units;
  Dropout dropout;
  uint32_t time, first_sample, first_row;
  bool shared;  // all rows have the mask of the first
  const S* in;  // [B,units]
  S* out;       // [K,B,units]; may be the memory of `in` if K = 1
};

// Its transpose: out[b,:] = sum_k in[k,b,:] * factor(time, sample k, row first_row + b).
template <typename S>
struct MaskSum {
  using A = typename AccumulateIn<S>::type;
  int64_t samples, rows, units;
  Dropout dropout;
  uint32_t time, first_row;
  bool shared;  // as in MaskRows
  const A* in;  // [K,B,units]
  A* out;       // [B,units]
};

// One mask per sample, the same for all rows: the units it drops, or those it keeps if these are
// fewer.
struct UnitLists {
  const int32_t* units;   // [K,H] ascending; the first counts[k] of row k count
  const int32_t* counts;  // [K]
  bool dropped;           // the listed units are those dropped
  double scale;           // 1 / (1 - p)
};

// The decoder under K shared masks: logits[k] = scale * (W h - W_dropped h_dropped) + bias, so only
// listed columns are multiplied for each sample.
template <typename S>
struct SharedDecode {
  using A = typename AccumulateIn<S>::type;
  int64_t samples, rows, hidden, vocab;
  UnitLists lists;
  const S* h;       // [B,H]
  const S* packed;  // W^T [H,V] by pack()
  const A* bias;    // [V] or null
  S* scratch;       // [K+1,B,H]
  A* logits;        // [K,B,V] out
};

// Its transpose: dh = sum_k mask_k * (u_k W).
template <typename S>
struct SharedDecodeBack {
  using A = typename AccumulateIn<S>::type;
  int64_t samples, rows, hidden, vocab;
  UnitLists lists;
  const S* u;         // [K,B,V]
  const S* weight_t;  // [H,V]
  A* dh;              // [B,H] in, if the lists are of dropped units: (sum_k u_k) W; out
};

// The same through plain matrix products, for devices whose libraries multiply best: the listed
// units of every mask, padded to lists of one length, gathered side by side.
struct ListUnits {
  int64_t steps, samples, units, length;
  Dropout dropout;
  uint32_t first_time;
  bool dropped;     // list the units dropped, not those kept
  int32_t* listed;  // [T,K,length] out: ascending, then -1
  int32_t* place;   // [T,K,H] out: where in its list a unit is; -1: it is not
};

template <typename S>
struct GatherUnits {
  int64_t samples, rows, hidden, vocab, length;
  const int32_t* listed;  // [K,length]
  const S* h;             // [B,H]
  double factor;
  S* listed_h;        // [K,B,length] out: factor * h; 0 where nothing is listed
  const S* weight_t;  // [H,V]
  S* columns;         // [K,length,V] out or null: columns of W, likewise
};

// dh = base_factor * dh + factor * what came back through the listed units.
template <typename S>
struct ScatterUnits {
  using A = typename AccumulateIn<S>::type;
  int64_t samples, rows, hidden, length;
  const int32_t* place;        // [K,H]
  const A* back;               // [K,B,length]
  double factor, base_factor;  // base_factor 0: dh is not read
  A* dh;                       // [B,H] in, out
};

// Opens the gate: active_out[k,b] = active[b] and delta[b] > threshold.
template <typename A>
struct Gate {
  int64_t samples, rows;
  const A* delta;         // [B]
  const A* threshold;     // [1]
  const uint8_t* active;  // [B] or null: all
  uint8_t* open;          // [K,B] out
};

// c = a * b (+ bias | + c), b prepacked.
template <typename S>
struct PackedGemm {
  using A = typename AccumulateIn<S>::type;
  int64_t rows, inner, cols;
  const S* a;  // [rows,inner], row stride lda
  int64_t lda;
  const S* packed;  // packed_size(inner, cols) elements, by pack()
  const A* bias;    // [cols] or null
  bool accumulate;  // add to c
  A* c;             // [rows,cols], row stride ldc
  int64_t ldc;
};

template <typename S>
struct PackMatrix {
  int64_t inner, cols;
  const S* b;  // element (k, n) at b[k * stride_inner + n * stride_cols]
  int64_t stride_inner, stride_cols;
  S* packed;
};

// c += a^T * b: the gradient of a weight, summed over the rows of its cotangents and inputs.
template <typename S>
struct OuterGemm {
  using A = typename AccumulateIn<S>::type;
  int64_t inner, rows, cols;
  const S* a;  // [inner,rows]
  const S* b;  // [inner,cols]
  S* scratch;  // outer_scratch(inner, rows, cols) elements
  A* c;        // [rows,cols]
};

// What a backend fills in, by name: leaving out an entry of the first part fails to compile.
template <typename S>
struct Kernels {
  using A = typename AccumulateIn<S>::type;
  void (*cell_forward)(const Launch&, const CellForward<S>&);
  void (*softmax_signal)(const Launch&, const SoftmaxSignal<S>&);
  void (*softmax_signal_backward)(const Launch&, const SoftmaxSignalBackward<S>&);
  void (*gold_arrives)(const Launch&, const GoldArrives<S>&);
  void (*mixture_signal)(const Launch&, const MixtureSignal<S>&);
  void (*mixture_signal_backward)(const Launch&, const MixtureSignalBackward<S>&);
  void (*recode)(const Launch&, const Recode<S>&);
  void (*recode_backward)(const Launch&, const RecodeBackward<S>&);
  void (*cell_backward)(const Launch&, const CellBackward<S>&);
  void (*dropout_mask)(const Launch&, const DropoutMask<A>&);
  void (*mask_rows)(const Launch&, const MaskRows<S>&);
  void (*mask_sum)(const Launch&, const MaskSum<S>&);
  void (*gate)(const Launch&, const Gate<A>&);
  void (*trial_step)(const Launch&, const TrialStep<S>&);
  void (*trial_verdict)(const Launch&, const TrialVerdict<A>&);

  // ---- what a device may do without. Null: ...

  // ... softmax_signal needs no scratch.
  int64_t (*softmax_scratch)(int64_t rows, int64_t vocab) = nullptr;
  // ... decoder and softmax are never one pass.
  int64_t (*stream_scratch)(int64_t rows, int64_t hidden) = nullptr;
  void (*stream_decode)(const Launch&, const StreamDecode<S>&) = nullptr;
  // ... masks shared by the batch are multiplied through the libraries, with the three below; ...
  void (*shared_decode)(const Launch&, const SharedDecode<S>&) = nullptr;
  void (*shared_decode_back)(const Launch&, const SharedDecodeBack<S>&) = nullptr;
  // ... with the two above.
  void (*list_units)(const Launch&, const ListUnits&) = nullptr;
  void (*gather_units)(const Launch&, const GatherUnits<S>&) = nullptr;
  void (*scatter_units)(const Launch&, const ScatterUnits<S>&) = nullptr;
  // ... the libraries multiply, through ATen, and no matrix is packed: see packs().
  int64_t (*packed_size)(int64_t inner, int64_t cols) = nullptr;
  void (*pack)(const Launch&, const PackMatrix<S>&) = nullptr;
  void (*gemm)(const Launch&, const PackedGemm<S>&) = nullptr;
  int64_t (*outer_scratch)(int64_t inner, int64_t rows, int64_t cols) = nullptr;
  void (*outer_gemm)(const Launch&, const OuterGemm<S>&) = nullptr;

  // Whether the device multiplies with packed matrices by itself.
  bool packs() const { return pack != nullptr; }
};

// CPU tables, compiled once per instruction set from kernels/cpu/kernels.cpp; picked at run time.
struct CpuKernels {
  const char* name;
  const Kernels<float>* f32;
  const Kernels<double>* f64;
};

}  // namespace fused_recoder
