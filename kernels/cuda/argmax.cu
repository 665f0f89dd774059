// Finds the id of each row's largest logit, the lowest id among equal ones. NaN never wins; a row whose largest logit
// is not finite gets the largest u32. One block per row. Bytes: 4 V read per row.
#include "logits.cuh"

constexpr u32 ARGMAX_THREADS = 1024;

struct ArgmaxParams {
  const float* logits;  // [rows, V]
  u32* best;            // [rows]
  u32 rows;
  u32 vocab;
};

struct ArgmaxShared {
  u64 best[ARGMAX_THREADS / WARP];  // by warp
};

// A rank that ascends with the logit, and among equal ones with descending id; 0 for NaN.
__device__ inline u64 rank_of_logit(float logit, u32 id) {
  const u32 key = key_of_logit(logit);
  return key == 0 ? 0 : static_cast<u64>(key) << 32 | static_cast<u32>(~id);
}

// Both infinities lie outside this range.
__device__ inline bool is_finite(u64 rank) { return rank >> 32 > 0x007fffffu && rank >> 32 < 0xff800000u; }

__device__ inline u64 larger(u64 a, u64 b) { return a > b ? a : b; }

__device__ inline u64 largest_of_lanes(u64 best) {
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) best = larger(best, of_lane_across(best, step));
  return best;
}

SEMMOE_KERNEL(semmoe_argmax, ArgmaxParams, ARGMAX_THREADS) {
  SEMMOE_SHARED(ArgmaxShared, shared);
  if (blockIdx.x >= p.rows) return;
  u64 best = 0;
  each_logit(row_at<float>(p.logits, blockIdx.x, p.vocab), p.vocab,
             [&best](u32 id, float logit) { best = larger(best, rank_of_logit(logit, id)); });
  best = largest_of_lanes(best);
  if (lane_id() == 0) shared.best[warp_id()] = best;
  __syncthreads();
  if (warp_id() != 0) return;
  best = largest_of_lanes(lane_id() < blockDim.x / WARP ? shared.best[lane_id()] : 0);
  if (lane_id() == 0) p.best[blockIdx.x] = is_finite(best) ? ~static_cast<u32>(best) : 0xffffffffu;
}
