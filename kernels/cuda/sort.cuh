// Counting sort by destination in one block: each warp counts its own range of the items, the counts are scanned, and
// each warp places its items. Warps process ascending ranges, so the order is stable.
#pragma once
#include "team.cuh"

struct SortShared {
  // One word more than there are ranks, so that a warp's lanes read a column without bank conflicts.
  u32 counts[SORT_THREADS / WARP][MAX_RANKS + 1];
  u32 totals[MAX_RANKS];
  u32 starts[MAX_RANKS + 1];
};

// The range of items of this warp.
struct Stretch {
  u32 begin;
  u32 end;

  __device__ explicit Stretch(u32 items) {
    const u32 warps = blockDim.x / WARP;
    const u32 each = ((items + warps - 1) / warps + WARP - 1) / WARP * WARP;
    const u64 first = static_cast<u64>(each) * warp_id();
    begin = first < items ? static_cast<u32>(first) : items;
    end = first + each < items ? static_cast<u32>(first) + each : items;
  }
};

// Replaces `counts` with the number of items before each warp's own, per destination, and sets `starts` to the first
// position of each destination.
__device__ inline void scan_counts(SortShared& shared, u32 ranks) {
  if (!SEMMOE_MUTANT(NO_SORT_BARRIER)) __syncthreads();
  const u32 warps = blockDim.x / WARP;
  for (u32 destination = warp_id(); destination < ranks; destination += warps) {
    const u32 own = lane_id() < warps ? shared.counts[lane_id()][destination] : 0;
    u32 sum = own;
#pragma unroll
    for (u32 step = 1; step < WARP; step *= 2) {
      const u32 before = __shfl_up_sync(ALL_LANES, sum, step);
      if (lane_id() >= step) sum += before;
    }
    if (lane_id() < warps) shared.counts[lane_id()][destination] = sum - own;
    if (lane_id() == WARP - 1) shared.totals[destination] = sum;
  }
  __syncthreads();
  if (threadIdx.x <= ranks) {
    u32 start = 0;
    for (u32 destination = 0; destination < threadIdx.x; ++destination) start += shared.totals[destination];
    shared.starts[threadIdx.x] = start;
  }
  __syncthreads();
}
