// Products of bf16 matrices on tensor cores, with the left operand stored by columns: `sums[m, n] += left[k, m] *
// right[k, n]` for 64 m, 16 k and 8 n per tile.
//
// A product may permute its k and its m. Lane 4 r + t therefore has the elements m = 8 r ..< 8 r + 8 of k = 4 t ..< 4 t
// + 4 of `left`: four loads of 16 bytes, without shared memory. Of `right` it has n = r and the same four k. Of the
// sums it gets n = 2 t, 2 t + 1 and again m = 8 r ..< 8 r + 8: `sums[tile][j][2 h + e]` is m = 8 r + 2 j + h, n = 2 t +
// e.
#pragma once
#include "compute.cuh"

constexpr u32 PRODUCT_M = 64;
constexpr u32 PRODUCT_K = 16;
constexpr u32 PRODUCT_N = 8;

// A lane's part of `right`: k = 4 t, 4 t + 1 in the first word, the lower one in the lower half.
struct RightPart {
  u32 w[2];
};

// r and t of this lane.
__device__ inline u32 lane_row() { return lane_id() / 4; }
__device__ inline u32 lane_step() { return lane_id() % 4; }

__device__ inline u32 lower_halves(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
__device__ inline u32 upper_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }

// Multiplies 16 m, 16 k and 8 n: `left` and `right` are in the instruction's layout.
__device__ inline void multiply_tile(float (&sums)[4], const u32 (&left)[4], const RightPart& right) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right.w[0]), "r"(right.w[1]));
#else
  shim::mma(sums, left, right.w);
#endif
}

// Multiplies a 16 x 64 piece of `left` with some tiles of `right`.
template <u32 TILES>
__device__ inline void multiply_columns(float (&sums)[TILES][4][4], const Vec (&left)[4], const RightPart (&right)[TILES]) {
#pragma unroll
  for (u32 j = 0; j < 4; ++j) {
    const u32 of[4] = {lower_halves(left[0].w[j], left[1].w[j]), upper_halves(left[0].w[j], left[1].w[j]),
                       lower_halves(left[2].w[j], left[3].w[j]), upper_halves(left[2].w[j], left[3].w[j])};
#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile) multiply_tile(sums[tile][j], of, right[tile]);
  }
}
