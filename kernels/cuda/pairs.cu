// Returns the experts' rows to their tokens: `out[r]` is the sum, in the order of the pairs, of `weight * y` over the
// pairs of r. One thread per 16 bytes of a row. A row that consists of NO_PAIR is not written.
#include "rows.cuh"

constexpr u32 PAIRS_AT_ONCE = 4;

struct SumPairsParams {
  const void* y;          // [pairs, H]
  const u32* first_pair;  // [R + 1]
  const u32* pair_of;     // [pairs]; NO_PAIR follows a row's pairs where it has fewer than others
  const float* weights;   // [pairs]
  void* out;              // [R, H]
  u32 rows;
  u32 pairs;
  u32 hidden;
  u32 padding;
};

template <class Access>
__device__ inline void sum_pairs(const SumPairsParams& p) {
  typedef typename Access::Element T;
  typedef typename Access::Values Values;
  const u32 row = blockIdx.y;
  const u32 unit = unit_in_row();
  if (row >= p.rows || unit >= p.hidden / Access::COUNT) return;
  const u32 begin = p.first_pair[row];
  u32 end = p.first_pair[row + 1];
  if (begin < end && end <= p.pairs) {
    if (p.pair_of[begin] == NO_PAIR) return;
    while (p.pair_of[end - 1] == NO_PAIR) --end;
  }
  Values sums = all_of<Access>(begin <= end && end <= p.pairs ? 0.0f : not_a_number());
  for (u32 first = begin; first < end && end <= p.pairs; first += PAIRS_AT_ONCE) {
    // The rows are loaded together, and added in order.
    Values rows[PAIRS_AT_ONCE];
    float weights[PAIRS_AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < PAIRS_AT_ONCE; ++i) {
      if (first + i >= end) continue;
      const u32 pair = p.pair_of[first + i];
      rows[i] = pair < p.pairs ? Access::load(row_at<T>(p.y, pair, p.hidden), unit) : all_of<Access>(not_a_number());
      weights[i] = pair < p.pairs ? p.weights[pair] : 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < PAIRS_AT_ONCE; ++i) {
      if (first + i >= end) continue;
#pragma unroll
      for (u32 j = 0; j < Access::COUNT; ++j) sums.of[j] = add(sums.of[j], multiply(weights[i], rows[i].of[j]));
    }
  }
  Access::store(row_at<T>(p.out, row, p.hidden), unit, sums);
}

SEMMOE_KERNEL(semmoe_sum_pairs_f32, SumPairsParams, ROW_THREADS) {
  whole_vectors<float>(p.hidden) ? sum_pairs<ByVector<float>>(p) : sum_pairs<ByElement<float>>(p);
}
SEMMOE_KERNEL(semmoe_sum_pairs_bf16, SumPairsParams, ROW_THREADS) {
  whole_vectors<Bf16>(p.hidden) ? sum_pairs<ByVector<Bf16>>(p) : sum_pairs<ByElement<Bf16>>(p);
}
