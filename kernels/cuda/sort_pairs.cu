// Sorts (row, expert) pairs by expert, then by row, into the lists that the experts' products and sums read: all choices
// of a rank that has all experts, or the routes that arrived in a dispatch. Each block counts all pairs; each of its
// warps places those of one expert. Bytes: the ids are read once per block and once per expert with rows; 22 are written
// per pair.
#include "matmul.cuh"

constexpr u32 SORT_PAIRS_THREADS = 1024;  // one per expert; a router has no more

struct SortPairsParams {
  const u16* experts;       // [n, k]: the router's choices; null in a sort of what arrived
  const float* weights;     // [n, k]
  u32* row_of;              // [n k]: rows of the sorted pairs
  float* sorted;            // [n k]: their weights
  u32* first_pair;          // [n + 1]
  u32* pair_of;             // [n k]: the sorted pairs of each row, by ascending expert, then NO_PAIR
  MatMulTile* tiles;        // [tile_count], empty ones last
  // Only in a sort of what arrived:
  const int* arrived;       // [n, k]: a row's experts, then -1
  const u32* arrived_rows;  // how many of the n rows arrived
  const u32* slot_of;       // [N]: an expert's index on this rank
  u32 rows;
  u32 top_k;
  u32 num_experts;  // N
  u32 slots;        // experts of this rank
  u32 tile_count;
  u32 tile_rows;
};

struct SortPairsShared {
  u32 counts[SORT_PAIRS_THREADS];  // by slot
  u32 firsts[SORT_PAIRS_THREADS];  // pairs of lower slots
  u32 pairs_of_warp[SORT_PAIRS_THREADS / WARP];
  u32 tiles_of_warp[SORT_PAIRS_THREADS / WARP];
};

// Inclusive prefix sum over the lanes.
__device__ inline u32 sum_to_lane(u32 sum) {
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) {
    const u32 before = __shfl_up_sync(ALL_LANES, sum, step);
    if (lane_id() >= step) sum += before;
  }
  return sum;
}

// The slot of each pair: its expert's index among those of this rank.
template <bool ARRIVED>
struct Slots {
  const SortPairsParams& p;
  u32 rows;

  __device__ explicit Slots(const SortPairsParams& params) : p(params), rows(ARRIVED ? *params.arrived_rows : params.rows) {
    if (rows > p.rows) trap();
  }

  // Returns a pair's slot, or NO_PAIR.
  __device__ u32 of(u32 pair) const {
    if (!ARRIVED) return checked(p.experts[pair], p.num_experts);
    if (pair >= rows * p.top_k || p.arrived[pair] == -1) return NO_PAIR;
    return checked(p.slot_of[checked(static_cast<u32>(p.arrived[pair]), p.num_experts)], p.slots);
  }

  __device__ static u32 checked(u32 index, u32 limit) {
    if (index >= limit) trap();
    return index;
  }

  // Returns the index in `pair_of` of a pair, among those of its row by slot. Unused pairs come last.
  __device__ u32 place_in_row(u32 pair) const {
    const u32 first = pair / p.top_k * p.top_k;
    const u32 slot = of(pair);
    u32 place = first;
    for (u32 other = first; other < first + p.top_k; ++other) {
      const u32 of_other = of(other);
      if (of_other < slot || (of_other == slot && other < pair)) ++place;
    }
    return place;
  }
};

template <bool ARRIVED>
__device__ inline void count_pairs(const Slots<ARRIVED>& slots, SortPairsShared& shared) {
  shared.counts[threadIdx.x] = 0;
  __syncthreads();
  for (u32 pair = threadIdx.x; pair < slots.rows * slots.p.top_k; pair += blockDim.x) {
    const u32 slot = slots.of(pair);
    if (slot != NO_PAIR) atomicAdd(&shared.counts[slot], 1u);
  }
  __syncthreads();
}

// Finds the first pair of each slot. The first block writes the tiles.
__device__ inline void cut_tiles(const SortPairsParams& p, SortPairsShared& shared) {
  const u32 pairs = shared.counts[threadIdx.x];
  const u32 tiles = (pairs + p.tile_rows - 1) / p.tile_rows;
  const u32 pairs_to_here = sum_to_lane(pairs);
  const u32 tiles_to_here = sum_to_lane(tiles);
  if (lane_id() == WARP - 1) {
    shared.pairs_of_warp[warp_id()] = pairs_to_here;
    shared.tiles_of_warp[warp_id()] = tiles_to_here;
  }
  __syncthreads();
  u32 first = pairs_to_here - pairs, tile = tiles_to_here - tiles, all_tiles = 0;
  for (u32 warp = 0; warp < blockDim.x / WARP; ++warp) {
    if (warp < warp_id()) first += shared.pairs_of_warp[warp];
    if (warp < warp_id()) tile += shared.tiles_of_warp[warp];
    all_tiles += shared.tiles_of_warp[warp];
  }
  shared.firsts[threadIdx.x] = first;
  __syncthreads();
  if (blockIdx.x != 0) return;
  if (all_tiles > p.tile_count) trap();
  for (u32 done = 0; done < pairs; done += p.tile_rows, ++tile) {
    p.tiles[tile] = MatMulTile{threadIdx.x, first + done, pairs - done < p.tile_rows ? pairs - done : p.tile_rows};
  }
  for (u32 empty = all_tiles + threadIdx.x; empty < p.tile_count; empty += blockDim.x) p.tiles[empty] = MatMulTile{0, 0, 0};
}

// Places the pairs of this warp's slot.
template <bool ARRIVED>
__device__ inline void place_pairs(const Slots<ARRIVED>& slots, const SortPairsShared& shared) {
  const SortPairsParams& p = slots.p;
  const u32 slot = blockIdx.x * (blockDim.x / WARP) + warp_id();
  if (slot >= p.slots || shared.counts[slot] == 0) return;
  u32 at = shared.firsts[slot];
  const u32 end = at + shared.counts[slot], below = (1u << lane_id()) - 1;
  for (u32 first = 0; at < end; first += WARP) {
    const u32 pair = first + lane_id();
    const bool mine = pair < slots.rows * p.top_k && slots.of(pair) == slot;
    const u32 found = __ballot_sync(ALL_LANES, mine);
    if (mine) {
      const u32 sorted = at + __popc(found & below);
      p.row_of[sorted] = pair / p.top_k;
      p.sorted[sorted] = p.weights[pair];
      p.pair_of[slots.place_in_row(pair)] = sorted;
    }
    at += __popc(found);
  }
}

template <bool ARRIVED>
__device__ inline void sort_pairs(const SortPairsParams& p) {
  SEMMOE_SHARED(SortPairsShared, shared);
  const Slots<ARRIVED> slots(p);
  count_pairs(slots, shared);
  cut_tiles(p, shared);
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  for (u32 row = thread; row <= p.rows; row += threads) p.first_pair[row] = row * p.top_k;
  for (u32 pair = thread; ARRIVED && pair < p.rows * p.top_k; pair += threads) {
    if (slots.of(pair) == NO_PAIR) p.pair_of[slots.place_in_row(pair)] = NO_PAIR;
  }
  place_pairs(slots, shared);
}

SEMMOE_KERNEL(semmoe_sort_pairs, SortPairsParams, SORT_PAIRS_THREADS) { sort_pairs<false>(p); }
SEMMOE_KERNEL(semmoe_sort_arrived, SortPairsParams, SORT_PAIRS_THREADS) { sort_pairs<true>(p); }
