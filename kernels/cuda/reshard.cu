// The copies of one layer of a layout switch, or of the KV cache: `to[rank][...] = from[move.rank][...]` for each move
// of this rank.
//
// A pull: each byte is read once from its source and written once, in units of 16 bytes if the whole move is aligned.
// No rank writes what another reads in the same call (semmoe_kernels::reshard), so ranks synchronise at entry (peers'
// buffers are as the previous layer left them) and at exit (all have read, so the next layer may overwrite).
#include "reduce.cuh"

struct Move {
  u64 from_offset;
  u64 from_stride;
  u64 to_offset;
  u64 to_stride;
  u64 bytes;  // of a row, at least 1
  u32 rows;   // at least 1
  u32 rank;   // whose memory is read
};

struct ReshardParams {
  Team team;
  const u8* from[MAX_RANKS];     // [from_bytes]
  u8* to[MAX_LOCAL];             // [to_bytes]; may be the rank's own `from`
  const Move* moves[MAX_LOCAL];  // [counts]
  u32 counts[MAX_LOCAL];
  u64 from_bytes;
  u64 to_bytes;
  u32 digest;  // of the switch: ranks that disagree stop
  u32 step;
};

// Whether rows fit in `memory` bytes at this stride. Nothing here can overflow.
__device__ inline bool within(const Move& move, u64 offset, u64 stride, u64 memory) {
  if (move.rows == 0 || move.bytes == 0 || move.bytes > memory || offset > memory - move.bytes) return false;
  return move.rows == 1 || (stride >= move.bytes && move.rows - 1 <= (memory - move.bytes - offset) / stride);
}

// Vectors of a thread in flight.
constexpr u32 RESHARD_UNROLL = 4;
constexpr u64 MAX_U32 = 0xffffffffu;

// Copies one move, shared by all warps of the rank, starting with warp `next`, where the previous move ended, so that
// no warp idles while others have more to do. Rows are treated as one sequence of vectors, because a slice of an expert
// may have rows far shorter than the data that a warp moves at once.
template <class Index>
__device__ inline void copy_vectors(const Move& move, const u8* from, u8* to, u32& next) {
  constexpr Index BYTES = sizeof(Vec);
  const Index per_row = static_cast<Index>(move.bytes / BYTES);
  const Index all = move.rows * per_row;
  const u32 warps = gridDim.x * (blockDim.x / WARP);
  const u32 own = blockIdx.x * (blockDim.x / WARP) + warp_id();
  const Index units = (all + WARP * RESHARD_UNROLL - 1) / (WARP * RESHARD_UNROLL);
  for (Index unit = own >= next ? own - next : own + warps - next; unit < units; unit += warps) {
    const Index first = unit * (WARP * RESHARD_UNROLL) + lane_id();
    Vec v[RESHARD_UNROLL];
#pragma unroll
    for (u32 j = 0; j < RESHARD_UNROLL; ++j) {
      const Index at = first + j * WARP;
      if (at < all) v[j] = load16(from + at / per_row * move.from_stride + at % per_row * BYTES);
    }
#pragma unroll
    for (u32 j = 0; j < RESHARD_UNROLL; ++j) {
      const Index at = first + j * WARP;
      if (at < all) store16(to + at / per_row * move.to_stride + at % per_row * BYTES, v[j]);
    }
  }
  next = static_cast<u32>((next + units) % warps);
}

__device__ inline void copy_bytes(const Move& move, const u8* from, u8* to) {
  const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
  const u64 all = move.rows * move.bytes;
  for (u64 at = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; at < all; at += threads) {
    const u64 row = at / move.bytes;
    const u64 byte = at % move.bytes;
    to[row * move.to_stride + byte] = from[row * move.from_stride + byte];
  }
}

SEMMOE_KERNEL(semmoe_reshard, ReshardParams, COLLECTIVE_THREADS) {
  const Meeting meeting(p.team);
  meeting.enter(shape_digest(OP_RESHARD, p.digest, p.step, 1));
  u32 next = 0;
  for (u32 i = 0; i < p.counts[blockIdx.y]; ++i) {
    const Move move = p.moves[blockIdx.y][i];
    if (move.rank >= p.team.ranks || !within(move, move.from_offset, move.from_stride, p.from_bytes) ||
        !within(move, move.to_offset, move.to_stride, p.to_bytes)) {
      stop(meeting.report(), STOP_MOVE, meeting.rank, meeting.rank, i);
    }
    const u8* from = p.from[move.rank] + move.from_offset;
    u8* to = p.to[blockIdx.y] + move.to_offset;
    const u64 places = move.from_offset | move.from_stride | move.to_offset | move.to_stride | move.bytes;
    if (places % sizeof(Vec) == 0 && move.rows * move.bytes <= MAX_U32) {
      copy_vectors<u32>(move, from, to, next);
    } else if (places % sizeof(Vec) == 0) {
      copy_vectors<u64>(move, from, to, next);
    } else {
      copy_bytes(move, from, to);
    }
  }
  meeting.leave();
}
