// The choice of experts: scores from the router's logits, the k best of them (or of the best groups), and their
// weights. One warp per row; lane l has experts l, l + 32, ... Among equal scores the lower id wins; NaN loses to every
// number.
#include "rows.cuh"

constexpr u32 ROUTE_THREADS = 128;

struct RouteParams {
  const float* logits;      // [n, N]
  const float* correction;  // [N]: added to the scores for the choice alone; null: none
  u16* experts;             // [n, k], strongest first
  float* weights;           // [n, k]
  int* ids;                 // [n, k]: the experts once more, as a dispatch reads them; null: not wanted
  u32 rows;
  u32 num_experts;
  u32 top_k;
  u32 groups;     // of experts of equal number, by id; 0: all are chosen from
  u32 kept;       // groups that are chosen from
  u32 two_best;   // not 0: a group's score is the sum of its two best, else its best
  u32 sigmoid;    // not 0: scores are sigmoids, else a softmax
  u32 normalise;  // not 0: the weights of a row sum to 1 before they are scaled
  float scale;
  u32 padding;
};

// Keys are ordered like the scores. Below them are the keys of experts already chosen, then of NaN:
constexpr u32 KEY_TAKEN = 0;
constexpr u32 KEY_NAN = 1;
constexpr u32 NO_EXPERT = 0xffffffffu;

__device__ inline u32 key_of(float score) {
  if (score != score) return KEY_NAN;
  // Both zeros are equal.
  const u32 bits = bits_of(score == 0.0f ? 0.0f : score);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float score_of(u32 key) {
  if (key <= KEY_NAN) return minus_infinity();
  return float_of(key >> 31 != 0 ? key & 0x7fffffffu : ~key);
}

struct Winner {
  u32 key;
  u32 id;
};

// Returns the largest key of all lanes, and the lowest id that has it.
__device__ inline Winner strongest_of_lanes(u32 key, u32 id) {
  const u32 most = __reduce_max_sync(ALL_LANES, key);
  return {most, __reduce_min_sync(ALL_LANES, key == most ? id : NO_EXPERT)};
}

template <u32 PER_LANE>
struct RowOfScores {
  u32 keys[PER_LANE];

  __device__ RowOfScores(const RouteParams& p, const float* logits) {
#pragma unroll
    for (u32 j = 0; j < PER_LANE; ++j) {
      const u32 expert = j * WARP + lane_id();
      keys[j] = KEY_TAKEN;
      if (expert >= p.num_experts) continue;
      const float logit = logits[expert];
      const float score = p.sigmoid != 0 ? sigmoid(logit) : logit;
      keys[j] = key_of(p.correction == nullptr ? score : add(score, p.correction[expert]));
    }
  }

  // Returns the winner among the experts in `begin..end` except `without`.
  __device__ Winner strongest(u32 begin, u32 end, u32 without) const {
    u32 best = KEY_TAKEN, id = NO_EXPERT;
#pragma unroll
    for (u32 j = 0; j < PER_LANE; ++j) {
      const u32 expert = j * WARP + lane_id();
      const bool counts = expert >= begin && expert < end && expert != without;
      if (counts && keys[j] > best) {
        best = keys[j];
        id = expert;
      }
    }
    return strongest_of_lanes(best, id);
  }

  __device__ void take(u32 expert) {
#pragma unroll
    for (u32 j = 0; j < PER_LANE; ++j) {
      if (j * WARP + lane_id() == expert) keys[j] = KEY_TAKEN;
    }
  }

  // Removes the groups that are not among the best.
  __device__ void keep_groups(const RouteParams& p) {
    const u32 size = p.num_experts / p.groups;
    u32 worth = KEY_TAKEN;  // of the group with this lane's number
    for (u32 group = 0; group < p.groups; ++group) {
      const Winner best = strongest(group * size, (group + 1) * size, NO_EXPERT);
      float score = score_of(best.key);
      if (p.two_best != 0) score = add(score, score_of(strongest(group * size, (group + 1) * size, best.id).key));
      if (group == lane_id()) worth = key_of(score);
    }
    u32 kept = 0;
    for (u32 i = 0; i < p.kept; ++i) {
      const u32 group = strongest_of_lanes(worth, lane_id()).id;
      kept |= 1u << group;
      if (group == lane_id()) worth = KEY_TAKEN;
    }
#pragma unroll
    for (u32 j = 0; j < PER_LANE; ++j) {
      const u32 expert = j * WARP + lane_id();
      if (expert < p.num_experts && (kept >> expert / size & 1) == 0) keys[j] = key_of(minus_infinity());
    }
  }
};

// Avoids a division by zero if all weights are 0, as in DeepSeek-V3.
constexpr float LEAST_TOTAL = 1e-20f;

// Lane i writes the weight of the i-th choice.
template <u32 PER_LANE>
__device__ inline void weigh(const RouteParams& p, const float* logits, u32 expert, u32 strongest, float* weight) {
  const bool chosen = lane_id() < p.top_k;
  const float logit = chosen ? logits[expert] : 0.0f;
  const float max = logits[strongest];
  float own = 0.0f;
  if (chosen) own = p.sigmoid != 0 ? sigmoid(logit) : expf(add(logit, -max));
  float total = 1.0f;
  if (p.normalise != 0) {
    total = add(sum_lanes(own), p.sigmoid != 0 ? LEAST_TOTAL : 0.0f);
  } else if (p.sigmoid == 0) {
    float all = 0.0f;
#pragma unroll
    for (u32 j = 0; j < PER_LANE; ++j) {
      const u32 other = j * WARP + lane_id();
      if (other < p.num_experts) all = add(all, expf(add(logits[other], -max)));
    }
    total = sum_lanes(all);
  }
  if (chosen) weight[lane_id()] = multiply(own / total, p.scale);
}

template <u32 PER_LANE>
__device__ inline void route(const RouteParams& p) {
  const u32 row = blockIdx.x * (ROUTE_THREADS / WARP) + warp_id();
  if (row >= p.rows) return;
  const float* logits = p.logits + static_cast<u64>(row) * p.num_experts;
  RowOfScores<PER_LANE> scores(p, logits);
  if (p.groups != 0) scores.keep_groups(p);
  u32 own = 0, strongest = 0;
  for (u32 i = 0; i < p.top_k; ++i) {
    const u32 expert = scores.strongest(0, p.num_experts, NO_EXPERT).id;
    scores.take(expert);
    if (i == 0) strongest = expert;
    if (i == lane_id()) own = expert;
  }
  const u64 first = static_cast<u64>(row) * p.top_k;
  if (lane_id() < p.top_k) {
    p.experts[first + lane_id()] = static_cast<u16>(own);
    if (p.ids != nullptr) p.ids[first + lane_id()] = static_cast<int>(own);
  }
  weigh<PER_LANE>(p, logits, own, strongest, p.weights + first);
}

SEMMOE_KERNEL(semmoe_route_128, RouteParams, ROUTE_THREADS) { route<4>(p); }
SEMMOE_KERNEL(semmoe_route_256, RouteParams, ROUTE_THREADS) { route<8>(p); }
SEMMOE_KERNEL(semmoe_route_1024, RouteParams, ROUTE_THREADS) { route<32>(p); }
