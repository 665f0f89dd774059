// Pack: does the work of `dispatch` in local memory, for ranks on other hosts: writes the rows for each rank
// contiguously. NCCL then sends each rank's segment; nothing waits for a peer here. Routes travel over the host.
//
// Bytes per rank: its rows read once; H elements written for each (token, rank).
#include "push.cuh"

struct PackParams {
  Team team;
  const void* x[MAX_LOCAL];     // [n, H]
  const int* places[MAX_LOCAL];  // [n, P]: of each token in the segments
  void* rows[MAX_RANKS];        // the segment of each rank
  u32 limits[MAX_RANKS];        // rows that each segment has room for
  u32 local_tokens[MAX_LOCAL];  // n
  u32 hidden;
  u32 padding;
};

template <class T>
__device__ inline void pack_rows(const PackParams& p) {
  const u32 ranks = p.team.ranks;
  const u32 warps = gridDim.x * (blockDim.x / WARP);
  for (u32 token = blockIdx.x * (blockDim.x / WARP) + warp_id(); token < p.local_tokens[blockIdx.y]; token += warps) {
    const int* places = p.places[blockIdx.y] + static_cast<u64>(token) * ranks;
    // The host determines how many rows are sent to each rank; places of a different plan do not match.
    for (u32 peer = lane_id(); peer < ranks; peer += WARP) {
      const int place = places[peer];
      if (place >= 0 && static_cast<u32>(place) >= p.limits[peer]) {
        stop(p.team.report[blockIdx.y], STOP_ROWS, p.team.first_rank, peer, static_cast<u32>(place) + 1);
      }
    }
    __syncwarp(ALL_LANES);
    push_row<T>(p, token, places);
  }
}

// Elements are only moved, so one kernel serves each element size.
SEMMOE_KERNEL(semmoe_pack_4, PackParams, COLLECTIVE_THREADS) { pack_rows<float>(p); }
SEMMOE_KERNEL(semmoe_pack_2, PackParams, COLLECTIVE_THREADS) { pack_rows<Bf16>(p); }
