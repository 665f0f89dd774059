// Plans which of one rank's tokens are sent to which ranks: once to each rank that hosts at least one of the token's
// experts. One block; local.
//
// It counts the rows for each rank and numbers them in token order; `dispatch` follows it on the same stream.
#include "sort.cuh"

struct PlanParams {
  const int* experts[MAX_LOCAL];         // [n, k]; below 0: the slot is not used
  const u32* rank_of_expert[MAX_LOCAL];  // [N], or null: every rank has a part of each expert
  int* places[MAX_LOCAL];                // [n, P]: place among the rows for that rank, or -1
  Signals* signals[MAX_LOCAL];           // gets the counts
  u64* report[MAX_LOCAL];
  u32 tokens[MAX_LOCAL];
  u32 top_k;
  u32 experts_in_all;
  u32 ranks;
  u32 padding;
};

// Bit r: the token has an expert on rank r.
__device__ inline u64 hosts_of(const PlanParams& p, u32 token) {
  u64 hosts = 0;
  for (u32 slot = 0; slot < p.top_k; ++slot) {
    const u64 at = static_cast<u64>(token) * p.top_k + slot;
    const int expert = p.experts[blockIdx.y][at];
    if (expert == -1) continue;
    const u32* ranks = p.rank_of_expert[blockIdx.y];
    u32 host = MAX_RANKS;
    if (static_cast<u32>(expert) < p.experts_in_all) host = ranks == nullptr ? p.ranks - 1 : ranks[expert];
    if (host >= p.ranks) {
      stop(p.report[blockIdx.y], STOP_DESTINATION, blockIdx.y, 0, static_cast<u32>(at));
      continue;
    }
    hosts |= ranks == nullptr ? ~0ull >> (MAX_RANKS - p.ranks) : 1ull << host;
  }
  return hosts;
}

SEMMOE_KERNEL(semmoe_dispatch_plan, PlanParams, SORT_THREADS) {
  SEMMOE_SHARED(SortShared, shared);
  const u32 y = blockIdx.y;
  const u32 tokens = p.tokens[y];
  u32* counts = shared.counts[warp_id()];
  for (u32 rank = lane_id(); rank < p.ranks; rank += WARP) counts[rank] = 0;
  __syncwarp(ALL_LANES);
  const Stretch stretch(tokens);
  for (u32 first = stretch.begin; first < stretch.end; first += WARP) {
    const u32 token = first + lane_id();
    const u64 hosts = token < stretch.end ? hosts_of(p, token) : 0;
    for (u32 rank = 0; rank < p.ranks; ++rank) {
      const u32 going = __ballot_sync(ALL_LANES, hosts >> rank & 1);
      if (lane_id() == 0) counts[rank] += __popc(going);
    }
  }
  scan_counts(shared, p.ranks);
  for (u32 rank = threadIdx.x; rank < p.ranks; rank += blockDim.x) p.signals[y]->counts[rank] = shared.totals[rank];
  const u32 below = (1u << lane_id()) - 1;
  for (u32 first = stretch.begin; first < stretch.end; first += WARP) {
    const u32 token = first + lane_id();
    const u64 hosts = token < stretch.end ? hosts_of(p, token) : 0;
    for (u32 rank = 0; rank < p.ranks; ++rank) {
      const u32 going = __ballot_sync(ALL_LANES, hosts >> rank & 1);
      const u32 place = counts[rank] + __popc(going & below);
      if (token < stretch.end) {
        p.places[y][static_cast<u64>(token) * p.ranks + rank] = hosts >> rank & 1 ? static_cast<int>(place) : -1;
      }
      __syncwarp(ALL_LANES);
      if (lane_id() == 0) counts[rank] += __popc(going);
      __syncwarp(ALL_LANES);
    }
  }
}
