// Stable order of n items by destination: permutation, inverse and offsets. One block, two passes over the items; lanes
// with the same destination find each other with __match_any_sync. Bytes: the destinations twice, 8 n + 4 (P + 1)
// written.
#include "sort.cuh"

struct ArgsortParams {
  const void* destinations[MAX_LOCAL];  // [n]
  u32* permutation[MAX_LOCAL];          // [n]
  u32* inverse[MAX_LOCAL];              // [n]
  u32* offsets[MAX_LOCAL];              // [P + 1]
  u64* report[MAX_LOCAL];
  u32 items;
  u32 ranks;
};

// Items that a warp loads at once, so that their latencies overlap.
constexpr u32 SORT_UNROLL = 8;
constexpr u32 NO_ITEM = 0xffffffffu;

template <class Key>
struct Keys {
  u32 of[SORT_UNROLL];

  __device__ Keys(const ArgsortParams& p, u32 first, u32 end) {
    const Key* destinations = static_cast<const Key*>(p.destinations[blockIdx.y]);
#pragma unroll
    for (u32 j = 0; j < SORT_UNROLL; ++j) {
      const u32 item = first + j * WARP + lane_id();
      of[j] = item < end ? destinations[item] : NO_ITEM;
      if (item < end && of[j] >= p.ranks) stop(p.report[blockIdx.y], STOP_DESTINATION, blockIdx.y, 0, item);
    }
  }
};

template <class Key>
__device__ inline void argsort(const ArgsortParams& p) {
  SEMMOE_SHARED(SortShared, shared);
  const u32 y = blockIdx.y;
  u32* counts = shared.counts[warp_id()];
  for (u32 destination = lane_id(); destination < p.ranks; destination += WARP) counts[destination] = 0;
  __syncwarp(ALL_LANES);
  const Stretch stretch(p.items);
  for (u32 first = stretch.begin; first < stretch.end; first += WARP * SORT_UNROLL) {
    const Keys<Key> keys(p, first, stretch.end);
#pragma unroll
    for (u32 j = 0; j < SORT_UNROLL; ++j) {
      const u32 same = __match_any_sync(ALL_LANES, keys.of[j]);
      const bool leads = lane_id() == static_cast<u32>(__ffs(same)) - 1;
      if (leads && keys.of[j] != NO_ITEM) counts[keys.of[j]] += __popc(same);
      // Another lane may lead this destination in the next round.
      __syncwarp(ALL_LANES);
    }
  }
  scan_counts(shared, p.ranks);
  for (u32 i = threadIdx.x; i <= p.ranks; i += blockDim.x) p.offsets[y][i] = shared.starts[i];
  const u32 below = (1u << lane_id()) - 1;
  for (u32 first = stretch.begin; first < stretch.end; first += WARP * SORT_UNROLL) {
    const Keys<Key> keys(p, first, stretch.end);
#pragma unroll
    for (u32 j = 0; j < SORT_UNROLL; ++j) {
      const u32 key = keys.of[j];
      const u32 same = __match_any_sync(ALL_LANES, key);
      if (key != NO_ITEM) {
        const u32 item = first + j * WARP + lane_id();
        const u32 position = shared.starts[key] + counts[key] + __popc(same & below);
        p.permutation[y][position] = item;
        p.inverse[y][item] = position;
      }
      __syncwarp(ALL_LANES);
      const bool leads = lane_id() == static_cast<u32>(__ffs(same)) - 1;
      if (leads && key != NO_ITEM) counts[key] += __popc(same);
      __syncwarp(ALL_LANES);
    }
  }
}

SEMMOE_KERNEL(semmoe_argsort_u16, ArgsortParams, SORT_THREADS) { argsort<u16>(p); }
SEMMOE_KERNEL(semmoe_argsort_u32, ArgsortParams, SORT_THREADS) { argsort<u32>(p); }
