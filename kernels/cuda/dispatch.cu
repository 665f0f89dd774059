// Dispatch: every rank pushes each of its tokens once to every rank that hosts one of its experts, with the experts and
// weights there.
//
// Rows arrive ordered by source rank, then by token, without gaps: after the synchronisation each rank reads the
// others' counts and computes where its rows begin. A row is read once, regardless of how many ranks receive it. Bytes
// per rank over the link: H elements and 8 k + 4 bytes of routing for each (token, other rank).
#include "push.cuh"

struct DispatchShared {
  u32 bases[MAX_RANKS];  // rows that each rank gets from lower ranks than this one
};

// Each thread sums the counts of lower ranks: for one destination, and for one source of this rank.
__device__ inline void count_rows(const DispatchParams& p, const Meeting& meeting, DispatchShared& shared) {
  const u32 i = threadIdx.x;
  const u32 ranks = p.team.ranks;
  if (i < ranks) {
    u32 base = 0;
    u32 all = 0;
    for (u32 source = 0; source < ranks; ++source) {
      const u32 rows = p.team.signals[source]->counts[i];
      if (source < meeting.rank) base += rows;
      all += rows;
    }
    // Every rank detects this, so none has written anything when all stop.
    if (all > p.capacity) stop(meeting.report(), STOP_ROWS, meeting.rank, i, all);
    shared.bases[i] = base;
  }
  if (i <= ranks && blockIdx.x == 0) {
    u32 start = 0;
    for (u32 source = 0; source < i; ++source) start += p.team.signals[source]->counts[meeting.rank];
    p.source_offsets[blockIdx.y][i] = start;
  }
  __syncthreads();
}

template <class T>
__device__ inline void dispatch(const DispatchParams& p) {
  SEMMOE_SHARED(DispatchShared, shared);
  const Meeting meeting(p.team);
  const u32 ranks = p.team.ranks;
  meeting.enter(mix(shape_digest(OP_DISPATCH, p.top_k, p.hidden, sizeof(T)), p.capacity));
  count_rows(p, meeting, shared);
  const u32 warps = gridDim.x * (blockDim.x / WARP);
  for (u32 token = blockIdx.x * (blockDim.x / WARP) + warp_id(); token < p.local_tokens[blockIdx.y]; token += warps) {
    int* rows = p.sent_rows[blockIdx.y] + static_cast<u64>(token) * ranks;
    // Only this warp reads and writes the token's places.
    for (u32 peer = lane_id(); peer < ranks; peer += WARP) {
      if (rows[peer] >= 0) rows[peer] += static_cast<int>(shared.bases[peer]);
    }
    __syncwarp(ALL_LANES);
    push_row<T>(p, token, rows);
    for (u32 peer = 0; peer < ranks; ++peer) {
      if (rows[peer] >= 0) push_routes(p, token, peer, static_cast<u32>(rows[peer]));
    }
  }
  meeting.leave();
}

// Elements are only moved, so one kernel serves each element size.
SEMMOE_KERNEL(semmoe_dispatch_4, DispatchParams, COLLECTIVE_THREADS) { dispatch<float>(p); }
SEMMOE_KERNEL(semmoe_dispatch_2, DispatchParams, COLLECTIVE_THREADS) { dispatch<Bf16>(p); }
