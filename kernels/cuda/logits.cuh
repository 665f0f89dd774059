// Rows of logits, read by the threads of one block.
#pragma once
#include "compute.cuh"

constexpr u32 LOGITS_UNROLL = 4;  // vectors of a thread in flight

// A key that ascends with the logit; 0 for NaN. Both zeros have equal keys.
__device__ inline u32 key_of_logit(float logit) {
  if (logit != logit) return 0;
  const u32 bits = bits_of(add(logit, 0.0f));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Returns the logit with this key; NaN for 0.
__device__ inline float logit_of_key(u32 key) {
  if (key == 0) return float_of(0x7fffffffu);
  return float_of(key >> 31 ? key & 0x7fffffffu : ~key);
}

__device__ inline u64 of_lane_across(u64 value, u32 step) {
  const u32 high = __shfl_xor_sync(ALL_LANES, static_cast<u32>(value >> 32), step);
  const u32 low = __shfl_xor_sync(ALL_LANES, static_cast<u32>(value), step);
  return static_cast<u64>(high) << 32 | low;
}

// Calls `take(id, logit)` for this thread's logits in [begin, end), as thread `thread` of `threads`. `begin` is a
// multiple of the vector size; so is `end` if rows are whole vectors.
template <class Take>
__device__ inline void each_logit(const float* logits, u32 vocab, u32 begin, u32 end, u32 thread, u32 threads, Take take) {
  if (!whole_vectors<float>(vocab)) {
    for (u32 id = begin + thread; id < end; id += threads) take(id, logits[id]);
    return;
  }
  const u32 vectors = end / 4;
  for (u32 first = begin / 4 + thread; first < vectors; first += LOGITS_UNROLL * threads) {
    Vec loaded[LOGITS_UNROLL];
#pragma unroll
    for (u32 j = 0; j < LOGITS_UNROLL; ++j) {
      const u32 vector = first + j * threads;
      loaded[j] = load16(logits + 4 * (vector < vectors ? vector : vectors - 1));
    }
#pragma unroll
    for (u32 j = 0; j < LOGITS_UNROLL; ++j) {
      const u32 vector = first + j * threads;
      if (vector >= vectors) continue;
      const Lanes<float> lanes = unpack<float>(loaded[j]);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) take(4 * vector + i, lanes.of[i]);
    }
  }
}

// Processes a whole row, divided among all threads of the block.
template <class Take>
__device__ inline void each_logit(const float* logits, u32 vocab, Take take) {
  each_logit(logits, vocab, 0, vocab, threadIdx.x, blockDim.x, take);
}
