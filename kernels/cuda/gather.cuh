// Pushes rows into the memories of all ranks, at their original positions.
#pragma once
#include "reduce.cuh"

struct GatherParams {
  Team team;
  const void* rows[MAX_LOCAL];        // [m, H]
  void* out[MAX_RANKS];               // [n, H] of each rank
  const u32* permutation[MAX_LOCAL];  // [n], or null: contiguous rows
  const u32* offsets[MAX_LOCAL];      // [P + 1], or null: even parts
  void* multicast;                    // the multicast address of `out`, for the NVLS variant
  u32 tokens;
  u32 hidden;
  u32 capacity;  // rows that `rows` has
  u32 padding;
};

template <class T, class Push>
__device__ inline void push_rows(const GatherParams& p, const Meeting& meeting, const Rows& rows, Push push) {
  constexpr u32 UNROLL = 4;
  const Segments<T, UNROLL> segments(rows.rows, p.hidden);
  for (u64 unit = segments.first(); unit < segments.units; unit += segments.stride()) {
    const u32 row = segments.row(unit);
    const u64 to = static_cast<u64>(token_at(meeting, p.permutation[blockIdx.y], rows.begin + row, p.tokens)) * p.hidden;
    const T* from = row_at<T>(p.rows[blockIdx.y], row, p.hidden);
    Vec v[UNROLL];
#pragma unroll
    for (u32 j = 0; j < UNROLL; ++j) {
      const u32 column = segments.column(unit, j);
      if (column < segments.vectors) v[j] = load16(from + column * Lanes<T>::COUNT);
    }
#pragma unroll
    for (u32 j = 0; j < UNROLL; ++j) {
      const u32 column = segments.column(unit, j);
      if (column < segments.vectors) push(to + column * Lanes<T>::COUNT, v[j]);
    }
  }
}

template <class T>
__device__ inline void push_elements(const GatherParams& p, const Meeting& meeting, const Rows& rows) {
  const u32 warps = blockDim.x / WARP;
  for (u32 row = blockIdx.x * warps + warp_id(); row < rows.rows; row += gridDim.x * warps) {
    const u64 to = static_cast<u64>(token_at(meeting, p.permutation[blockIdx.y], rows.begin + row, p.tokens)) * p.hidden;
    const T* from = row_at<T>(p.rows[blockIdx.y], row, p.hidden);
    for (u32 column = lane_id(); column < p.hidden; column += WARP) {
      for (u32 peer = 0; peer < p.team.ranks; ++peer) push_element(static_cast<T*>(p.out[peer]) + to + column, from[column]);
    }
  }
}

template <class T, class Push>
__device__ inline void gather(const GatherParams& p, u32 variant, Push push) {
  const Meeting meeting(p.team);
  meeting.enter(shape_digest(OP_ALLGATHER, p.tokens, p.hidden, sizeof(T) + variant));
  const Rows rows(meeting, p.offsets[blockIdx.y], p.tokens, p.capacity);
  if (whole_vectors<T>(p.hidden)) {
    push_rows<T>(p, meeting, rows, push);
  } else {
    push_elements<T>(p, meeting, rows);
  }
  meeting.leave();
}

// Elements are only moved, so one kernel serves each element size. Ranks start with different peers.
template <class T>
__device__ inline void allgather(const GatherParams& p) {
  const u32 rank = p.team.first_rank + blockIdx.y;
  gather<T>(p, 0, [&](u64 element, const Vec& v) {
    for (u32 i = 0; i < p.team.ranks; ++i) {
      const u32 peer = rank + i < p.team.ranks ? rank + i : rank + i - p.team.ranks;
      push16(static_cast<T*>(p.out[peer]) + element, v);
    }
  });
}
