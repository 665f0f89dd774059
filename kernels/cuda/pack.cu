// Pack: what `dispatch` does, into local memory, for ranks on other hosts: the rows for each rank one behind the other, with the experts
// and weights there. NCCL then sends each rank's segment; nothing waits for a peer here.
//
// Bytes per rank: its rows read once; H elements and 8 k + 4 bytes of routing written for each (token, rank).
#include "push.cuh"

struct PackParams {
  DispatchParams dispatch;  // `rows`, `tokens`, .. begin at each rank's segment; `sent_rows` holds the places of dispatch_plan
  u32 limits[MAX_RANKS];    // rows that each segment has room for
};

template <class T>
__device__ inline void pack_rows(const PackParams& all) {
  const DispatchParams& p = all.dispatch;
  const u32 ranks = p.team.ranks;
  const u32 warps = gridDim.x * (blockDim.x / WARP);
  for (u32 token = blockIdx.x * (blockDim.x / WARP) + warp_id(); token < p.local_tokens[blockIdx.y]; token += warps) {
    const int* places = p.sent_rows[blockIdx.y] + static_cast<u64>(token) * ranks;
    // The host was told how many rows go to each rank; a plan of other tokens has other counts.
    for (u32 peer = lane_id(); peer < ranks; peer += WARP) {
      const int place = places[peer];
      if (place >= 0 && static_cast<u32>(place) >= all.limits[peer]) {
        stop(p.team.report[blockIdx.y], STOP_ROWS, p.team.first_rank, peer, static_cast<u32>(place) + 1);
      }
    }
    __syncwarp(ALL_LANES);
    push_row<T>(p, token, places);
    for (u32 peer = 0; peer < ranks; ++peer) {
      if (places[peer] >= 0) push_routes(p, token, peer, static_cast<u32>(places[peer]));
    }
  }
}

// Elements are only moved, so one kernel serves each size.
SEMMOE_KERNEL(semmoe_pack_4, PackParams, COLLECTIVE_THREADS) { pack_rows<float>(p); }
SEMMOE_KERNEL(semmoe_pack_2, PackParams, COLLECTIVE_THREADS) { pack_rows<Bf16>(p); }
