// All-reduce: each rank sums one P-th of the elements and pushes it to all ranks. Bytes per rank over the link, with N
// elements: (P-1)/P N in and as much out. An element is read and written by the same thread, so a part may be
// overwritten.
#include "reduce.cuh"

struct AllReduceParams {
  Team team;
  const void* parts[MAX_RANKS];  // [elements] of each rank
  void* out[MAX_RANKS];          // [elements] of each rank; may be its part
  u64 elements;
};

template <class T, u32 RANKS>
__device__ inline Vec sum_vector(const AllReduceParams& p, u64 element, u32 rank) {
  Vec v[RANKS];
  load_peers<T, RANKS>(v, p.parts, element, rank);
  return pack<T>(sum_loaded<T, RANKS>(v, rank));
}

template <class T>
__device__ inline Vec sum_vector_any(const AllReduceParams& p, u64 element, u32 rank) {
  switch (p.team.ranks) {
    case 2:
      return sum_vector<T, 2>(p, element, rank);
    case 4:
      return sum_vector<T, 4>(p, element, rank);
    case 8:
      return sum_vector<T, 8>(p, element, rank);
    default:
      return pack<T>(sum_any<T>(p.parts, p.team.ranks, element));
  }
}

template <class T>
__device__ inline void all_reduce(const AllReduceParams& p) {
  const Meeting meeting(p.team);
  const u32 rank = meeting.rank;
  const u32 ranks = p.team.ranks;
  meeting.enter(shape_digest(OP_ALL_REDUCE, static_cast<u32>(p.elements), static_cast<u32>(p.elements >> 32), sizeof(T)));
  const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
  const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 vectors = p.elements / Lanes<T>::COUNT;
  const u64 end = vectors * (rank + 1) / ranks;
  for (u64 vector = vectors * rank / ranks + thread; vector < end; vector += threads) {
    const u64 element = vector * Lanes<T>::COUNT;
    const Vec sum = sum_vector_any<T>(p, element, rank);
    for (u32 i = 0; i < ranks; ++i) push16(static_cast<T*>(p.out[(rank + i) % ranks]) + element, sum);
  }
  // The elements after the last whole vector belong to the last rank.
  if (rank == ranks - 1) {
    for (u64 element = vectors * Lanes<T>::COUNT + thread; element < p.elements; element += threads) {
      const T sum = from_float<T>(sum_element<T>(p.parts, ranks, element));
      for (u32 i = 0; i < ranks; ++i) push_element(static_cast<T*>(p.out[i]) + element, sum);
    }
  }
  meeting.leave();
}

SEMMOE_KERNEL(semmoe_all_reduce_f32, AllReduceParams, COLLECTIVE_THREADS) { all_reduce<float>(p); }
SEMMOE_KERNEL(semmoe_all_reduce_f16, AllReduceParams, COLLECTIVE_THREADS) { all_reduce<F16>(p); }
SEMMOE_KERNEL(semmoe_all_reduce_bf16, AllReduceParams, COLLECTIVE_THREADS) { all_reduce<Bf16>(p); }
