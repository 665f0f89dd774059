// Sampling candidates of each row that requests them: its largest logits, or those around the token that a random
// number selects, and the sum of all weights, exp((logit - largest) scale), in units of 2^-42: integer sums do not
// depend on order. One block per row, four to six passes over it. Bytes: 4 V read per row, then from the cache.
#include "logits.cuh"

constexpr u32 CANDIDATE_THREADS = 1024;
constexpr u32 CANDIDATES = 128;
constexpr float WEIGHT_UNITS = 4398046511104.0f;  // 2^42
// A key is three digits: 11, 11 and 10 bits.
constexpr u32 MOST_BUCKETS = 1u << 11;

struct CandidateAsk {
  float scale;  // 1 / temperature; 0: no request
  float drawn;  // in [0, 1): share of the sum of weights that selects the token; below 0: the largest logits
};

struct CandidateRow {
  u64 total;    // of all weights
  u64 before;   // of the weights of ids below the first candidate, if a number selects
  float largest;
  u32 count;    // of candidates
  u32 ids[CANDIDATES];
  float logits[CANDIDATES];
};

struct CandidatesParams {
  const float* logits;       // [rows, V]
  const CandidateAsk* asks;  // [rows]
  CandidateRow* out;         // [rows]
  u32 rows;
  u32 vocab;
};

struct CandidatesShared {
  u64 sums[CANDIDATE_THREADS / WARP];  // by warp
  u32 keys[CANDIDATE_THREADS / WARP];  // the largest, by warp
  u32 buckets[MOST_BUCKETS];
  u32 key;    // of the smallest candidate: the digits found so far
  u32 equal;  // candidates among the logits with this key
  u32 above;  // candidates written with a larger key
  u32 level;  // candidates written with this key
};

struct RowOfLogits {
  const float* logits;
  u32 vocab;
  float largest;
  float scale;

  __device__ u64 weight(float logit) const {
    const float exponent = multiply(add(logit, -largest), scale);
    // False for NaN.
    return exponent <= 0.0f ? static_cast<u64>(multiply(expf(exponent), WEIGHT_UNITS)) : 0;
  }
};

__device__ inline u64 sum_of_lanes(u64 sum) {
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) sum += of_lane_across(sum, step);
  return sum;
}

__device__ inline u32 largest_key(CandidatesShared& shared, const float* logits, u32 vocab) {
  u32 key = 0;
  each_logit(logits, vocab, [&key](u32, float logit) {
    const u32 other = key_of_logit(logit);
    if (other > key) key = other;
  });
  key = __reduce_max_sync(ALL_LANES, key);
  if (lane_id() == 0) shared.keys[warp_id()] = key;
  __syncthreads();
  return __reduce_max_sync(ALL_LANES, lane_id() < blockDim.x / WARP ? shared.keys[lane_id()] : 0);
}

// This warp's range of ids, in whole tiles of CANDIDATES.
struct Part {
  u32 begin;
  u32 end;

  __device__ explicit Part(u32 vocab) {
    const u32 tiles = (vocab + CANDIDATES - 1) / CANDIDATES;
    const u32 warps = blockDim.x / WARP;
    const u32 each = (tiles + warps - 1) / warps * CANDIDATES;
    begin = warp_id() * each < vocab ? warp_id() * each : vocab;
    end = begin + each < vocab ? begin + each : vocab;
  }
};

// Writes the tile in which the sum of weights passes `target`. The warp that owns the tile writes it.
__device__ inline void write_drawn(const CandidatesShared& shared, const RowOfLogits& row, u64 target, CandidateRow& out) {
  u64 before = 0;
  for (u32 warp = 0; warp < warp_id(); ++warp) before += shared.sums[warp];
  if (target < before || target - before >= shared.sums[warp_id()]) return;
  const Part part(row.vocab);
  for (u32 first = part.begin; first < part.end; first += CANDIDATES) {
    float logits[CANDIDATES / WARP];
    u64 sum = 0;
#pragma unroll
    for (u32 j = 0; j < CANDIDATES / WARP; ++j) {
      const u32 id = first + j * WARP + lane_id();
      logits[j] = id < part.end ? row.logits[id] : float_of(0x7fffffffu);
      sum += row.weight(logits[j]);
    }
    sum = sum_of_lanes(sum);
    if (target - before >= sum) {
      before += sum;
      continue;
    }
#pragma unroll
    for (u32 j = 0; j < CANDIDATES / WARP; ++j) {
      out.ids[j * WARP + lane_id()] = first + j * WARP + lane_id();
      out.logits[j * WARP + lane_id()] = logits[j];
    }
    if (lane_id() == 0) {
      out.before = before;
      out.count = part.end - first < CANDIDATES ? part.end - first : CANDIDATES;
    }
    return;
  }
}

// Finds the next digit of the smallest candidate's key: counted from the largest, the candidates end in its bucket.
// Runs in warp 0.
__device__ inline void find_digit(CandidatesShared& shared, u32 shift, u32 buckets) {
  const u32 each = buckets / WARP;
  const u32 first = buckets - (lane_id() + 1) * each;
  u32 own = 0;
  // Each lane starts at a different bucket, so that lanes read different banks.
  for (u32 i = 0; i < each; ++i) own += shared.buckets[first + (i + lane_id()) % each];
  u32 sum = own;
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) {
    const u32 of_larger = __shfl_up_sync(ALL_LANES, sum, step);
    if (lane_id() >= step) sum += of_larger;
  }
  u32 left = shared.equal;
  __syncwarp(ALL_LANES);
  if (sum < left || sum - own >= left) return;
  left -= sum - own;
  u32 bucket = first + each - 1;
  for (; left > shared.buckets[bucket]; --bucket) left -= shared.buckets[bucket];
  shared.key |= bucket << shift;
  shared.equal = left;
}

// Writes the `count` largest logits; ties with the smallest are broken arbitrarily.
__device__ inline void write_largest(CandidatesShared& shared, const RowOfLogits& row, u32 count, CandidateRow& out) {
  u32 known = 0;  // bits of the key
  for (u32 digit = 0; digit < 3; ++digit) {
    const u32 bits = digit < 2 ? 11 : 10;
    const u32 shift = digit < 2 ? 21 - 11 * digit : 0;
    for (u32 bucket = threadIdx.x; bucket < 1u << bits; bucket += blockDim.x) shared.buckets[bucket] = 0;
    __syncthreads();
    const u32 least = shared.key;
    each_logit(row.logits, row.vocab, [&shared, least, known, shift, bits](u32, float logit) {
      const u32 key = key_of_logit(logit);
      if (((key ^ least) & known) == 0) atomicAdd(&shared.buckets[key >> shift & ((1u << bits) - 1)], 1u);
    });
    __syncthreads();
    if (warp_id() == 0) find_digit(shared, shift, 1u << bits);
    known |= ((1u << bits) - 1) << shift;
    __syncthreads();
  }
  const u32 least = shared.key, level = shared.equal;
  each_logit(row.logits, row.vocab, [&shared, &out, least, level, count](u32 id, float logit) {
    const u32 key = key_of_logit(logit);
    if (key < least) return;
    u32 at = 0;
    if (key > least) {
      at = atomicAdd(&shared.above, 1u);
    } else {
      at = atomicAdd(&shared.level, 1u);
      if (at >= level) return;
      at += count - level;
    }
    out.ids[at] = id;
    out.logits[at] = logit;
  });
  if (threadIdx.x == 0) {
    out.before = 0;
    out.count = count;
  }
}

SEMMOE_KERNEL(semmoe_candidates, CandidatesParams, CANDIDATE_THREADS) {
  SEMMOE_SHARED(CandidatesShared, shared);
  if (blockIdx.x >= p.rows || p.asks[blockIdx.x].scale == 0.0f) return;
  const CandidateAsk ask = p.asks[blockIdx.x];
  CandidateRow& out = p.out[blockIdx.x];
  const u32 count = p.vocab < CANDIDATES ? p.vocab : CANDIDATES;
  if (threadIdx.x == 0) {
    shared.key = shared.above = shared.level = 0;
    shared.equal = count;
  }
  const float* logits = row_at<float>(p.logits, blockIdx.x, p.vocab);
  const RowOfLogits row = {logits, p.vocab, logit_of_key(largest_key(shared, logits, p.vocab)), ask.scale};
  const Part part(p.vocab);
  u64 sum = 0;
  each_logit(logits, p.vocab, part.begin, part.end, lane_id(), WARP, [&sum, &row](u32, float logit) { sum += row.weight(logit); });
  sum = sum_of_lanes(sum);
  if (lane_id() == 0) shared.sums[warp_id()] = sum;
  __syncthreads();
  u64 total = 0;
  for (u32 warp = 0; warp < blockDim.x / WARP; ++warp) total += shared.sums[warp];
  if (threadIdx.x == 0) {
    out.total = total;
    out.largest = row.largest;
  }
  if (ask.drawn < 0.0f || total == 0) {
    write_largest(shared, row, count, out);
  } else {
    const u64 target = static_cast<u64>(static_cast<double>(total) * ask.drawn);
    write_drawn(shared, row, target < total ? target : total - 1, out);
  }
}
