// Shuffled allgather, and the plain one without a permutation: `out[r][permutation[begin + i]] = rows[i]` for every
// rank r.
//
// A push into the original positions: the un-shuffle is free. Bytes per rank, with N = n x H elements: N / P read and N
// written, (P-1)/P N of them over the link.
#include "gather.cuh"

SEMMOE_KERNEL(semmoe_sag_4, GatherParams, COLLECTIVE_THREADS) { allgather<float>(p); }
SEMMOE_KERNEL(semmoe_sag_2, GatherParams, COLLECTIVE_THREADS) { allgather<Bf16>(p); }
