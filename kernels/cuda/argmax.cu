// The id of each row's largest logit, the lowest among equals. NaN never wins; a row whose largest is not finite gets
// the largest u32. One block per row. Bytes: 4 V read per row.
#include "compute.cuh"

constexpr u32 ARGMAX_THREADS = 1024;
constexpr u32 ARGMAX_UNROLL = 4;  // vectors of a thread in flight

struct ArgmaxParams {
  const float* logits;  // [rows, V]
  u32* best;            // [rows]
  u32 rows;
  u32 vocab;
};

struct ArgmaxShared {
  u64 best[ARGMAX_THREADS / WARP];  // by warp
};

// Ascends with the logit, and among equals with descending id; 0 for NaN.
__device__ inline u64 rank_of_logit(float logit, u32 id) {
  if (logit != logit) return 0;
  // The two zeros are equal.
  const u32 bits = bits_of(add(logit, 0.0f));
  const u32 ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<u64>(ascending) << 32 | static_cast<u32>(~id);
}

// Both infinities lie outside this range.
__device__ inline bool is_finite(u64 rank) { return rank >> 32 > 0x007fffffu && rank >> 32 < 0xff800000u; }

__device__ inline u64 larger(u64 a, u64 b) { return a > b ? a : b; }

__device__ inline u64 largest_of_lanes(u64 best) {
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) {
    const u32 high = __shfl_xor_sync(ALL_LANES, static_cast<u32>(best >> 32), step);
    const u32 low = __shfl_xor_sync(ALL_LANES, static_cast<u32>(best), step);
    best = larger(best, static_cast<u64>(high) << 32 | low);
  }
  return best;
}

SEMMOE_KERNEL(semmoe_argmax, ArgmaxParams, ARGMAX_THREADS) {
  SEMMOE_SHARED(ArgmaxShared, shared);
  if (blockIdx.x >= p.rows) return;
  const float* logits = row_at<float>(p.logits, blockIdx.x, p.vocab);
  u64 best = 0;
  if (whole_vectors<float>(p.vocab)) {
    const u32 vectors = p.vocab / 4;
    for (u32 first = threadIdx.x; first < vectors; first += ARGMAX_UNROLL * blockDim.x) {
      Vec loaded[ARGMAX_UNROLL];
#pragma unroll
      for (u32 j = 0; j < ARGMAX_UNROLL; ++j) {
        // Past the end, the last vector is read again, which changes nothing.
        const u32 vector = first + j * blockDim.x;
        loaded[j] = load16(logits + 4 * (vector < vectors ? vector : vectors - 1));
      }
#pragma unroll
      for (u32 j = 0; j < ARGMAX_UNROLL; ++j) {
        const u32 vector = first + j * blockDim.x;
        const Lanes<float> lanes = unpack<float>(loaded[j]);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          best = larger(best, rank_of_logit(lanes.of[i], 4 * (vector < vectors ? vector : vectors - 1) + i));
        }
      }
    }
  } else {
    for (u32 id = threadIdx.x; id < p.vocab; id += blockDim.x) best = larger(best, rank_of_logit(logits[id], id));
  }
  best = largest_of_lanes(best);
  if (lane_id() == 0) shared.best[warp_id()] = best;
  __syncthreads();
  if (warp_id() != 0) return;
  best = largest_of_lanes(lane_id() < blockDim.x / WARP ? shared.best[lane_id()] : 0);
  if (lane_id() == 0) p.best[blockIdx.x] = is_finite(best) ? ~static_cast<u32>(best) : 0xffffffffu;
}
