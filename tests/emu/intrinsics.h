// The CUDA functions that kernels may call, as far as the host compiler does not know them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "scheduler.h"

// Default arguments that name the kernel's line (inside of braces they would name this file's).
#define EMU_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMU_CALLER) { emu::sync_block({file, line}); }

inline void __syncwarp(unsigned mask = ~0u, EMU_CALLER) {
  emu::sync_warp({emu::Collective::kSyncWarp, mask, nullptr, nullptr, 0, 0, false, {file, line}});
}

inline unsigned __ballot_sync(unsigned mask, int vote, EMU_CALLER) {
  return emu::sync_warp(
      {emu::Collective::kBallot, mask, nullptr, nullptr, 0, 0, vote != 0, {file, line}});
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, EMU_CALLER) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  T result = value;
  emu::sync_warp({emu::Collective::kShuffle,
                  mask,
                  &value,
                  &result,
                  sizeof(T),
                  source & 31,
                  false,
                  {file, line}});
  return result;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, EMU_CALLER) {
  return __shfl_sync(mask, value, static_cast<int>(emu::lane()) ^ bits, file, line);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, EMU_CALLER) {
  const unsigned lane = emu::lane();
  return __shfl_sync(mask, value, static_cast<int>(lane + distance < 32 ? lane + distance : lane),
                     file, line);
}

// One thread of the operating system runs all, but ThreadSanitizer has to see an atomic operation.
template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  T before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do {
    after = before + value;
  } while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return before;
}

inline void __threadfence() { emu::fence(); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

using std::max;
using std::min;
