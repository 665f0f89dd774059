// The copies of one layer of a layout switch, or of keys and values: `to[rank][...] = from[move.rank][...]` for each move
// of this rank.
//
// A pull: each byte is read once from where it is and written once, by 16 bytes where all of a move is aligned. No rank
// writes what another reads in the same call (semmoe_kernels::reshard), so ranks meet at entry (peers' buffers are as the
// layer before left them) and at exit (all have read, so the next layer may overwrite).
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

// Whether rows lie in memory of so many bytes. Nothing here can overflow.
__device__ inline bool within(const Move& move, u64 offset, u64 stride, u64 memory) {
  if (move.rows == 0 || move.bytes == 0 || move.bytes > memory || offset > memory - move.bytes) return false;
  return stride == 0 || move.rows - 1 <= (memory - move.bytes - offset) / stride;
}

// Vectors in flight; eight spill registers on sm_90.
constexpr u32 RESHARD_UNROLL = 4;

// One move, shared by all warps of the rank; `turn` spreads moves of few vectors over them.
__device__ inline void copy_vectors(const Move& move, const u8* from, u8* to, u32 turn) {
  constexpr u32 BYTES = sizeof(Vec);
  const u64 vectors = move.bytes / BYTES;
  const u64 per_row = (vectors + WARP * RESHARD_UNROLL - 1) / (WARP * RESHARD_UNROLL);
  const u64 warps = static_cast<u64>(gridDim.x) * (blockDim.x / WARP);
  const u64 own = static_cast<u64>(blockIdx.x) * (blockDim.x / WARP) + warp_id();
  for (u64 unit = (own + turn) % warps; unit < move.rows * per_row; unit += warps) {
    const u8* source = from + unit / per_row * move.from_stride;
    u8* target = to + unit / per_row * move.to_stride;
    const u64 first = unit % per_row * (WARP * RESHARD_UNROLL) + lane_id();
    Vec v[RESHARD_UNROLL];
#pragma unroll
    for (u32 j = 0; j < RESHARD_UNROLL; ++j) {
      if (first + j * WARP < vectors) v[j] = load16(source + (first + j * WARP) * BYTES);
    }
#pragma unroll
    for (u32 j = 0; j < RESHARD_UNROLL; ++j) {
      if (first + j * WARP < vectors) store16(target + (first + j * WARP) * BYTES, v[j]);
    }
  }
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
  for (u32 i = 0; i < p.counts[blockIdx.y]; ++i) {
    const Move move = p.moves[blockIdx.y][i];
    if (move.rank >= p.team.ranks || !within(move, move.from_offset, move.from_stride, p.from_bytes) ||
        !within(move, move.to_offset, move.to_stride, p.to_bytes)) {
      stop(meeting.report(), STOP_MOVE, meeting.rank, meeting.rank, i);
    }
    const u8* from = p.from[move.rank] + move.from_offset;
    u8* to = p.to[blockIdx.y] + move.to_offset;
    const u64 places = move.from_offset | move.from_stride | move.to_offset | move.to_stride | move.bytes;
    if (places % sizeof(Vec) == 0) {
      copy_vectors(move, from, to, i);
    } else {
      copy_bytes(move, from, to);
    }
  }
  meeting.leave();
}
