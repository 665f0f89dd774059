// Sorts the (row, expert) pairs of a rank that has all experts by expert, then by row, into the lists that the experts'
// products and sums read. Each block counts all pairs; each of its warps places those of one expert. Bytes: the ids are
// read once per block and once per expert with rows; 22 are written per pair.
#include "matmul.cuh"

constexpr u32 SORT_PAIRS_THREADS = 1024;  // one per expert; a router has no more

struct SortPairsParams {
  const u16* experts;    // [n, k]
  const float* weights;  // [n, k]
  u32* row_of;           // [n k]: rows of the sorted pairs
  float* sorted;         // [n k]: their weights
  u32* first_pair;       // [n + 1]
  u32* pair_of;          // [n k]: the sorted pairs of each row, by ascending expert
  MatMulTile* tiles;     // [tile_count], empty ones last
  u32 rows;
  u32 top_k;
  u32 num_experts;
  u32 tile_count;
  u32 tile_rows;
  u32 padding;
};

struct SortPairsShared {
  u32 counts[SORT_PAIRS_THREADS];  // by expert
  u32 firsts[SORT_PAIRS_THREADS];  // pairs of lower experts
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

__device__ inline void count_pairs(const SortPairsParams& p, SortPairsShared& shared) {
  shared.counts[threadIdx.x] = 0;
  __syncthreads();
  for (u32 pair = threadIdx.x; pair < p.rows * p.top_k; pair += blockDim.x) {
    const u32 expert = p.experts[pair];
    if (expert >= p.num_experts) trap();
    atomicAdd(&shared.counts[expert], 1u);
  }
  __syncthreads();
}

// Finds the first pair of each expert. The first block writes the tiles.
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

// Returns the index of a pair among those of its row.
__device__ inline u32 place_in_row(const SortPairsParams& p, u32 pair, u32 expert) {
  const u32 first = pair / p.top_k * p.top_k;
  u32 place = 0;
  for (u32 other = first; other < first + p.top_k; ++other) {
    const u32 of_other = p.experts[other];
    if (of_other < expert || (of_other == expert && other < pair)) ++place;
  }
  return first + place;
}

SEMMOE_KERNEL(semmoe_sort_pairs, SortPairsParams, SORT_PAIRS_THREADS) {
  SEMMOE_SHARED(SortPairsShared, shared);
  count_pairs(p, shared);
  cut_tiles(p, shared);
  for (u32 row = blockIdx.x * blockDim.x + threadIdx.x; row <= p.rows; row += gridDim.x * blockDim.x) {
    p.first_pair[row] = row * p.top_k;
  }
  const u32 expert = blockIdx.x * (blockDim.x / WARP) + warp_id();
  if (expert >= p.num_experts || shared.counts[expert] == 0) return;
  u32 at = shared.firsts[expert];
  const u32 end = at + shared.counts[expert], below = (1u << lane_id()) - 1;
  for (u32 first = 0; at < end; first += WARP) {
    const u32 pair = first + lane_id();
    const bool mine = pair < p.rows * p.top_k && p.experts[pair] == expert;
    const u32 found = __ballot_sync(ALL_LANES, mine);
    if (mine) {
      const u32 sorted = at + __popc(found & below);
      p.row_of[sorted] = pair / p.top_k;
      p.sorted[sorted] = p.weights[pair];
      p.pair_of[place_in_row(p, pair, expert)] = sorted;
    }
    at += __popc(found);
  }
}
