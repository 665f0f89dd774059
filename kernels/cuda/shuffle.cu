// Moves rows into the order of a permutation, or back, in local memory. The fused collectives avoid this kernel, which
// is kept as the baseline and as the first step over NCCL. 2 N bytes of memory traffic.
#include "reduce.cuh"

struct ShuffleParams {
  const void* from[MAX_LOCAL];        // [rows, H]
  void* to[MAX_LOCAL];                // [rows, H]
  const u32* permutation[MAX_LOCAL];  // [rows], each below rows
  u64* report[MAX_LOCAL];
  u32 rows;
  u32 hidden;
  u32 back;  // 0: to[i] = from[permutation[i]]; 1: to[permutation[i]] = from[i]
  u32 padding;
};

template <class T>
__device__ inline void shuffle(const ShuffleParams& p) {
  const u32 warps = blockDim.x / WARP;
  for (u32 row = blockIdx.x * warps + warp_id(); row < p.rows; row += gridDim.x * warps) {
    const u32 other = p.permutation[blockIdx.y][row];
    if (other >= p.rows) stop(p.report[blockIdx.y], STOP_PERMUTATION, blockIdx.y, blockIdx.y, row);
    const T* from = row_at<T>(p.from[blockIdx.y], p.back ? row : other, p.hidden);
    T* to = row_at<T>(p.to[blockIdx.y], p.back ? other : row, p.hidden);
    if (whole_vectors<T>(p.hidden)) {
#pragma unroll 8
      for (u32 column = lane_id() * Lanes<T>::COUNT; column < p.hidden; column += WARP * Lanes<T>::COUNT) {
        store16(to + column, load16(from + column));
      }
    } else {
      for (u32 column = lane_id(); column < p.hidden; column += WARP) to[column] = from[column];
    }
  }
}

SEMMOE_KERNEL(semmoe_shuffle_4, ShuffleParams, COLLECTIVE_THREADS) { shuffle<float>(p); }
SEMMOE_KERNEL(semmoe_shuffle_2, ShuffleParams, COLLECTIVE_THREADS) { shuffle<Bf16>(p); }
