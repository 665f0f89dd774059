// Shuffled reduce-scatter, and the plain one without a permutation: `out[i] = sum over r of parts[r][permutation[begin
// + i]]`.
//
// A pull: each rank reads its tokens' rows from all P ranks and writes the sums once. Shuffling costs only the read of
// the permutation. Bytes per rank, with N = n x H elements: N read ((P-1)/P N of them over the link), N / P written.
#include "reduce.cuh"

SEMMOE_KERNEL(semmoe_srs_f32, ReduceParams, COLLECTIVE_THREADS) { reduce_scatter<float>(p); }
SEMMOE_KERNEL(semmoe_srs_f16, ReduceParams, COLLECTIVE_THREADS) { reduce_scatter<F16>(p); }
SEMMOE_KERNEL(semmoe_srs_bf16, ReduceParams, COLLECTIVE_THREADS) { reduce_scatter<Bf16>(p); }
