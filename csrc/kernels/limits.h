// The limits that the engine and the kernels share, each once. What a file takes for granted of
// them it asserts, so that retuning one fails to compile where it does not fit.
#pragma once

#include <stdint.h>

namespace fused_recoder {

// StreamDecode: up to so many rows W is streamed row by row (kernels/cpu/stream_decode.h), whatever
// the signal; ...
constexpr int64_t kStreamRows = 2;
// ... gold signals of up to so many in blocks (kernels/cpu/block_decode.h).
constexpr int64_t kStreamGoldRows = 64;
static_assert(kStreamRows <= kStreamGoldRows, "rows beyond kStreamRows go in blocks");

// Dropout masks: what the counter of the random bits has room for (make_dropout).
constexpr int kSampleBits = 20;
constexpr int64_t kMaxSamples = (int64_t(1) << kSampleBits) - 1;
constexpr int64_t kDropoutStreams = int64_t(1) << (32 - kSampleBits);

}  // namespace fused_recoder
