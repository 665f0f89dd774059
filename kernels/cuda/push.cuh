// Pushes tokens to their destination ranks, with the experts and weights there: shared by `dispatch` and `pack`.
#pragma once
#include "reduce.cuh"

struct DispatchParams {
  Team team;
  const void* x[MAX_LOCAL];              // [n, H]
  const int* experts[MAX_LOCAL];         // [n, k]
  const float* weights[MAX_LOCAL];       // [n, k]
  const u32* rank_of_expert[MAX_LOCAL];  // [N], or null: every rank has a part of each expert
  int* sent_rows[MAX_LOCAL];             // [n, P]: places from dispatch_plan; becomes rows
  u32* source_offsets[MAX_LOCAL];        // [P + 1]
  void* rows[MAX_RANKS];                 // [capacity, H] of each rank
  u32* tokens[MAX_RANKS];                // [capacity]
  int* row_experts[MAX_RANKS];           // [capacity, k]
  float* row_weights[MAX_RANKS];         // [capacity, k]
  u32 local_tokens[MAX_LOCAL];           // n
  u32 hidden;
  u32 top_k;
  u32 capacity;
  u32 padding;
};

// Writes the token's experts on one rank, in the router's order, then -1.
__device__ inline void push_routes(const DispatchParams& p, u32 token, u32 peer, u32 row) {
  const u32 y = blockIdx.y;
  int* experts = p.row_experts[peer] + static_cast<u64>(row) * p.top_k;
  float* weights = p.row_weights[peer] + static_cast<u64>(row) * p.top_k;
  u32 kept = 0;
  for (u32 first = 0; first < p.top_k; first += WARP) {
    const u32 slot = first + lane_id();
    const u64 at = static_cast<u64>(token) * p.top_k + slot;
    const int expert = slot < p.top_k ? p.experts[y][at] : -1;
    // The plan has rejected experts and ranks out of range.
    const u32* ranks = p.rank_of_expert[y];
    const bool there = expert >= 0 && (ranks == nullptr || ranks[expert] == peer);
    const u32 all_there = __ballot_sync(ALL_LANES, there);
    const u32 to = kept + __popc(all_there & ((1u << lane_id()) - 1));
    if (there) {
      push_element(experts + to, expert);
      push_element(weights + to, p.weights[y][at]);
    }
    kept += __popc(all_there);
  }
  for (u32 slot = kept + lane_id(); slot < p.top_k; slot += WARP) {
    push_element(experts + slot, -1);
    push_element(weights + slot, 0.0f);
  }
  if (lane_id() == 0) push_element(p.tokens[peer] + row, token);
}

// Pushes one token's row to all its ranks.
template <class T, class Params>
__device__ inline void push_row(const Params& p, u32 token, const int* rows) {
  constexpr u32 UNROLL = 8;
  const T* from = row_at<T>(p.x[blockIdx.y], token, p.hidden);
  const u32 ranks = p.team.ranks;
  if (!whole_vectors<T>(p.hidden)) {
    for (u32 peer = 0; peer < ranks; ++peer) {
      if (rows[peer] < 0) continue;
      T* to = row_at<T>(p.rows[peer], rows[peer], p.hidden);
      for (u32 column = lane_id(); column < p.hidden; column += WARP) push_element(to + column, from[column]);
    }
    return;
  }
  const u32 vectors = p.hidden / Lanes<T>::COUNT;
  for (u32 first = lane_id(); first < vectors; first += WARP * UNROLL) {
    Vec v[UNROLL];
#pragma unroll
    for (u32 j = 0; j < UNROLL; ++j) {
      if (first + j * WARP < vectors) v[j] = load16(from + (first + j * WARP) * Lanes<T>::COUNT);
    }
    for (u32 peer = 0; peer < ranks; ++peer) {
      if (rows[peer] < 0) continue;
      T* to = row_at<T>(p.rows[peer], rows[peer], p.hidden);
#pragma unroll
      for (u32 j = 0; j < UNROLL; ++j) {
        if (first + j * WARP < vectors) push16(to + (first + j * WARP) * Lanes<T>::COUNT, v[j]);
      }
    }
  }
}
