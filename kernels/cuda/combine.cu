// Combine: every rank pulls the weighted sums of its tokens from the ranks that computed them, and adds them in rank order.
//
// Bytes per rank over the link: one row for each (token, other rank) that dispatch sent; n x H written.
#include "reduce.cuh"

struct CombineParams {
  Team team;
  const void* sums[MAX_RANKS];      // [R_q, H] of each rank
  const int* sent_rows[MAX_LOCAL];  // [n, P], from dispatch
  void* out[MAX_LOCAL];             // [n, H]
  u32 local_tokens[MAX_LOCAL];      // n
  u32 hidden;
  u32 capacity;  // rows that each rank's `sums` has room for
};

// For ranks on other hosts: NCCL has copied each rank's sums for this rank into local memory.
struct UnpackParams {
  CombineParams combine;  // `sums` begin at each rank's segment; `sent_rows` holds the places of tokens there
  u32 limits[MAX_RANKS];  // rows that each segment has
};

// The ranks of a token: lanes check 32 of them at once. Rows must be below `limits`, or below the capacity if there are
// none.
struct Sent {
  u64 ranks = 0;
  const int* rows;

  __device__ Sent(const CombineParams& p, u32 own, const u32* limits, u32 token) {
    rows = p.sent_rows[blockIdx.y] + static_cast<u64>(token) * p.team.ranks;
    for (u32 first = 0; first < p.team.ranks; first += WARP) {
      const u32 rank = first + lane_id();
      const int row = rank < p.team.ranks ? rows[rank] : -1;
      const u32 limit = limits == nullptr || rank >= p.team.ranks ? p.capacity : limits[rank];
      if (row >= 0 && static_cast<u32>(row) >= limit) stop(p.team.report[blockIdx.y], STOP_ROWS, own, rank, row);
      ranks |= static_cast<u64>(__ballot_sync(ALL_LANES, row >= 0)) << first;
    }
  }
};

template <class T>
__device__ inline Lanes<T> sum_sent(const CombineParams& p, const Sent& sent, u32 column) {
  constexpr u32 AT_ONCE = 4;
  Lanes<T> sum = {};
  bool first = true;
  for (u64 left = sent.ranks; left != 0;) {
    Vec v[AT_ONCE];
    bool loaded[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; ++i) {
      loaded[i] = left != 0;
      if (!loaded[i]) continue;
      const u32 rank = static_cast<u32>(__ffsll(static_cast<long long>(left))) - 1;
      left &= left - 1;
      v[i] = load16(row_at<T>(p.sums[rank], sent.rows[rank], p.hidden) + column);
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; ++i) {
      if (!loaded[i]) continue;
      // The sum starts with the first value, not with zero, to preserve minus zero.
      if (first) {
        sum = unpack<T>(v[i]);
        first = false;
      } else {
        accumulate<T>(sum, v[i]);
      }
    }
  }
  return sum;
}

template <class T>
__device__ inline float sum_sent_element(const CombineParams& p, const Sent& sent, u32 column) {
  float sum = 0.0f;
  bool first = true;
  for (u64 left = sent.ranks; left != 0; left &= left - 1) {
    const u32 rank = static_cast<u32>(__ffsll(static_cast<long long>(left))) - 1;
    const float value = to_float(row_at<T>(p.sums[rank], sent.rows[rank], p.hidden)[column]);
    sum = first ? value : add(sum, value);
    first = false;
  }
  return sum;
}

template <class T>
__device__ inline void combine_rows(const CombineParams& p, u32 own, const u32* limits) {
  const u32 warps = gridDim.x * (blockDim.x / WARP);
  for (u32 token = blockIdx.x * (blockDim.x / WARP) + warp_id(); token < p.local_tokens[blockIdx.y]; token += warps) {
    const Sent sent(p, own, limits, token);
    T* out = row_at<T>(p.out[blockIdx.y], token, p.hidden);
    if (whole_vectors<T>(p.hidden)) {
      for (u32 column = lane_id() * Lanes<T>::COUNT; column < p.hidden; column += WARP * Lanes<T>::COUNT) {
        store16(out + column, pack<T>(sum_sent<T>(p, sent, column)));
      }
    } else {
      for (u32 column = lane_id(); column < p.hidden; column += WARP) {
        out[column] = from_float<T>(sum_sent_element<T>(p, sent, column));
      }
    }
  }
}

template <class T>
__device__ inline void combine(const CombineParams& p) {
  const Meeting meeting(p.team);
  meeting.enter(shape_digest(OP_COMBINE, p.capacity, p.hidden, sizeof(T)));
  combine_rows<T>(p, meeting.rank, nullptr);
  meeting.leave();
}

template <class T>
__device__ inline void unpack_sums(const UnpackParams& p) {
  combine_rows<T>(p.combine, p.combine.team.first_rank, p.limits);
}

SEMMOE_KERNEL(semmoe_combine_f32, CombineParams, COLLECTIVE_THREADS) { combine<float>(p); }
SEMMOE_KERNEL(semmoe_combine_f16, CombineParams, COLLECTIVE_THREADS) { combine<F16>(p); }
SEMMOE_KERNEL(semmoe_combine_bf16, CombineParams, COLLECTIVE_THREADS) { combine<Bf16>(p); }
SEMMOE_KERNEL(semmoe_unpack_f32, UnpackParams, COLLECTIVE_THREADS) { unpack_sums<float>(p); }
SEMMOE_KERNEL(semmoe_unpack_f16, UnpackParams, COLLECTIVE_THREADS) { unpack_sums<F16>(p); }
SEMMOE_KERNEL(semmoe_unpack_bf16, UnpackParams, COLLECTIVE_THREADS) { unpack_sums<Bf16>(p); }
