// Sums of one row over all ranks, pulled from the ranks' memories, in f32 and in rank order.
#pragma once
#include "team.cuh"

// Ranks read from one another in pairs (rank ^ i), so that they never all pull from the same rank. The sum then
// restores rank order.
template <u32 RANKS>
__device__ inline void untangle(Vec (&v)[RANKS], u32 rank) {
#pragma unroll
  for (u32 bit = 1; bit < RANKS; bit <<= 1) {
    const bool swapped = rank & bit;
#pragma unroll
    for (u32 i = 0; i < RANKS; ++i) {
      if (i & bit) continue;
#pragma unroll
      for (u32 word = 0; word < 4; ++word) {
        const u32 low = v[i].w[word];
        const u32 high = v[i | bit].w[word];
        v[i].w[word] = swapped ? high : low;
        v[i | bit].w[word] = swapped ? low : high;
      }
    }
  }
}

// The sum of one vector of a row, with RANKS loads in flight. RANKS is a power of two.
template <class T, u32 RANKS>
__device__ inline Lanes<T> sum_loaded(Vec (&v)[RANKS], u32 rank) {
  untangle<RANKS>(v, rank);
  Lanes<T> sum = unpack<T>(v[0]);
#pragma unroll
  for (u32 i = 1; i < RANKS; ++i) accumulate<T>(sum, v[i]);
  return sum;
}

template <class T, u32 RANKS>
__device__ inline void load_peers(Vec (&v)[RANKS], const void* const* parts, u64 element, u32 rank) {
#pragma unroll
  for (u32 i = 0; i < RANKS; ++i) v[i] = load16(static_cast<const T*>(parts[i ^ rank]) + element);
}

// The sum for any number of ranks, with four loads in flight.
template <class T>
__device__ inline Lanes<T> sum_any(const void* const* parts, u32 ranks, u64 element) {
  constexpr u32 AT_ONCE = 4;
  Lanes<T> sum = unpack<T>(load16(static_cast<const T*>(parts[0]) + element));
  for (u32 first = 1; first < ranks; first += AT_ONCE) {
    Vec v[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; ++i) {
      if (first + i < ranks) v[i] = load16(static_cast<const T*>(parts[first + i]) + element);
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; ++i) {
      if (first + i < ranks) accumulate<T>(sum, v[i]);
    }
  }
  return sum;
}

template <class T>
__device__ inline float sum_element(const void* const* parts, u32 ranks, u64 element) {
  float sum = to_float(static_cast<const T*>(parts[0])[element]);
  for (u32 r = 1; r < ranks; ++r) sum = add(sum, to_float(static_cast<const T*>(parts[r])[element]));
  return sum;
}

// The rows of one rank: positions begin..begin + rows of the order.
struct Rows {
  u32 begin;
  u32 rows;

  // Stops if offsets or capacity do not fit, before anything has been written.
  __device__ Rows(const Meeting& meeting, const u32* offsets, u32 tokens, u32 capacity) {
    begin = offset(meeting, offsets, tokens, meeting.rank);
    const u32 end = offset(meeting, offsets, tokens, meeting.rank + 1);
    if (begin > end || end > tokens) stop(meeting.report(), STOP_OFFSETS, meeting.rank, meeting.rank, end);
    rows = end - begin;
    if (rows > capacity) stop(meeting.report(), STOP_ROWS, meeting.rank, meeting.rank, rows);
  }

  // Without offsets, parts are even: the first n mod P ranks have one more row.
  __device__ static u32 offset(const Meeting& meeting, const u32* offsets, u32 tokens, u32 rank) {
    if (offsets != nullptr) return offsets[rank];
    const u32 more = tokens % meeting.team.ranks;
    return tokens / meeting.team.ranks * rank + (rank < more ? rank : more);
  }
};

// The token at a position of the order.
__device__ inline u32 token_at(const Meeting& meeting, const u32* permutation, u32 position, u32 tokens) {
  if (permutation == nullptr) return position;
  const u32 token = permutation[position];
  if (token >= tokens) stop(meeting.report(), STOP_PERMUTATION, meeting.rank, meeting.rank, position);
  return token;
}

struct ReduceParams {
  Team team;
  const void* parts[MAX_RANKS];       // [n, H] of each rank
  void* out[MAX_LOCAL];               // [capacity, H]
  const u32* permutation[MAX_LOCAL];  // [n], or null: contiguous rows
  const u32* offsets[MAX_LOCAL];      // [P + 1], or null: even parts
  const void* multicast;              // the parts' multicast address, for the NVLS variant
  u32 tokens;
  u32 hidden;
  u32 capacity;
  u32 padding;
};

// Calls `sum(element)` for the start of each vector of this rank's rows, and writes the results.
template <class T, u32 UNROLL, class Load, class Sum>
__device__ inline void reduce_rows(const ReduceParams& p, const Meeting& meeting, const Rows& rows, Load load, Sum sum) {
  const Segments<T, UNROLL> segments(rows.rows, p.hidden);
  for (u64 unit = segments.first(); unit < segments.units; unit += segments.stride()) {
    const u32 row = segments.row(unit);
    const u64 from = static_cast<u64>(token_at(meeting, p.permutation[blockIdx.y], rows.begin + row, p.tokens)) * p.hidden;
    T* to = row_at<T>(p.out[blockIdx.y], row, p.hidden);
    // All loads of the segment are issued before the first sum waits for one.
    decltype(load(u64{})) loaded[UNROLL];
#pragma unroll
    for (u32 j = 0; j < UNROLL; ++j) {
      const u32 column = segments.column(unit, j);
      if (column < segments.vectors) loaded[j] = load(from + column * Lanes<T>::COUNT);
    }
#pragma unroll
    for (u32 j = 0; j < UNROLL; ++j) {
      const u32 column = segments.column(unit, j);
      if (column < segments.vectors) store16(to + column * Lanes<T>::COUNT, pack<T>(sum(loaded[j])));
    }
  }
}

template <u32 RANKS>
struct Peers {
  Vec v[RANKS];
};

template <class T, u32 RANKS, u32 UNROLL>
__device__ inline void reduce_power_of_two(const ReduceParams& p, const Meeting& meeting, const Rows& rows) {
  reduce_rows<T, UNROLL>(
      p, meeting, rows,
      [&](u64 element) {
        Peers<RANKS> peers;
        load_peers<T, RANKS>(peers.v, p.parts, element, meeting.rank);
        return peers;
      },
      [&](Peers<RANKS>& peers) { return sum_loaded<T, RANKS>(peers.v, meeting.rank); });
}

// Rows whose width is not a multiple of 16 bytes: element by element.
template <class T>
__device__ inline void reduce_elements(const ReduceParams& p, const Meeting& meeting, const Rows& rows) {
  const u32 warps = blockDim.x / WARP;
  for (u32 row = blockIdx.x * warps + warp_id(); row < rows.rows; row += gridDim.x * warps) {
    const u64 from = static_cast<u64>(token_at(meeting, p.permutation[blockIdx.y], rows.begin + row, p.tokens)) * p.hidden;
    T* to = row_at<T>(p.out[blockIdx.y], row, p.hidden);
    for (u32 column = lane_id(); column < p.hidden; column += WARP) {
      to[column] = from_float<T>(sum_element<T>(p.parts, p.team.ranks, from + column));
    }
  }
}

enum Op : u32 { OP_REDUCE_SCATTER = 1, OP_ALLGATHER, OP_ALL_REDUCE, OP_REDUCE_NORM, OP_DISPATCH, OP_COMBINE, OP_RESHARD };

template <class T>
__device__ inline void reduce_scatter(const ReduceParams& p) {
  const Meeting meeting(p.team);
  meeting.enter(shape_digest(OP_REDUCE_SCATTER, p.tokens, p.hidden, sizeof(T)));
  const Rows rows(meeting, p.offsets[blockIdx.y], p.tokens, p.capacity);
  if (!whole_vectors<T>(p.hidden)) {
    reduce_elements<T>(p, meeting, rows);
  } else if (p.team.ranks == 2) {
    reduce_power_of_two<T, 2, 4>(p, meeting, rows);
  } else if (p.team.ranks == 4) {
    reduce_power_of_two<T, 4, 2>(p, meeting, rows);
  } else if (p.team.ranks == 8) {
    reduce_power_of_two<T, 8, 1>(p, meeting, rows);
  } else {
    reduce_rows<T, 1>(
        p, meeting, rows, [](u64 element) { return element; },
        [&](u64 element) { return sum_any<T>(p.parts, p.team.ranks, element); });
  }
  meeting.leave();
}
