// What the matrix products share: which rows a block has, which weights, and where sums go.
//
// out[i] = x[row_of[i]] W^T, with weights in their checkpoints' order: a feature's inputs lie side by side. A block has MATMUL_FEATURES
// features of one tile of up to MATMUL_TILE_ROWS rows. How the sum of one output is divided over lanes and warps depends on its inputs
// alone: a row has the same bits in any tile.
#pragma once
#include "compute.cuh"

constexpr u32 MATMUL_THREADS = 256;
constexpr u32 MATMUL_WARPS = MATMUL_THREADS / WARP;
constexpr u32 MATMUL_TILE_ROWS = 64;
constexpr u32 MATMUL_FEATURES_SHIFT = 4;
constexpr u32 MATMUL_FEATURES = 1u << MATMUL_FEATURES_SHIFT;

// Bits of `flags`.
constexpr u32 MATMUL_OUT_F32 = 1;
constexpr u32 MATMUL_SILU_PRODUCT = 2;
constexpr u32 MATMUL_GROUPED = 4;

struct MatMulTile {
  u32 group;  // whose weights
  u32 first;  // row of out
  u32 rows;   // 0: nothing to do
};

struct MatMulParams {
  const void* x;            // [x_rows, K], rows x_stride elements apart
  const void* weights;      // [groups, N, K], of a product with SiLU [groups, 2 N, K], gate above up
  void* out;                // [rows, N]
  const float* bias;        // [N] or null
  const u32* row_of;        // [rows] or null: a row's own index
  const MatMulTile* tiles;  // [tile_count], if MATMUL_GROUPED; else all rows in order, of group 0
  u32 inputs;               // K
  u32 outputs;              // N
  u32 x_stride;
  u32 x_rows;
  u32 rows;
  u32 tile_count;
  u32 groups;
  u32 flags;
};

// The tile of this block. Numbers that fit neither weights nor rows are the caller's defect: nothing may be written then.
__device__ inline MatMulTile matmul_tile(const MatMulParams& p) {
  const u32 first = blockIdx.y * MATMUL_TILE_ROWS;
  if (!(p.flags & MATMUL_GROUPED)) {
    const u32 left = first < p.rows ? p.rows - first : 0;
    return MatMulTile{0, first, left < MATMUL_TILE_ROWS ? left : MATMUL_TILE_ROWS};
  }
  if (blockIdx.y >= p.tile_count) return MatMulTile{0, 0, 0};
  const MatMulTile tile = p.tiles[blockIdx.y];
  const bool fits = tile.first <= p.rows && tile.rows <= p.rows - tile.first && tile.rows <= MATMUL_TILE_ROWS;
  if (tile.group >= p.groups || !fits) trap();
  return tile;
}

// The row of x that a row of the tile is computed from. Behind the tile's last row it is the last: computed again, never stored.
__device__ inline u32 matmul_source(const MatMulParams& p, const MatMulTile& tile, u32 row) {
  const u32 own = tile.first + (row < tile.rows ? row : tile.rows - 1);
  const u32 source = p.row_of == nullptr ? own : p.row_of[own];
  if (source >= p.x_rows) trap();
  return source;
}

// Two rows of weights, as indices: features apart by MATMUL_FEATURES / 2, or gate and up of one feature.
struct MatMulFeatures {
  u32 shift;  // 2^shift: features of a block
  u32 count;
  u32 first;  // the block's first
  bool product;

  __device__ explicit MatMulFeatures(const MatMulParams& p) {
    product = (p.flags & MATMUL_SILU_PRODUCT) != 0;
    shift = product ? MATMUL_FEATURES_SHIFT - 1 : MATMUL_FEATURES_SHIFT;
    count = 1u << shift;
    first = blockIdx.x * count;
  }
  // Of the block's n-th row of weights. Behind the last feature it is the last: computed again, never stored.
  __device__ u64 weight_row(const MatMulParams& p, const MatMulTile& tile, u32 n) const {
    const bool up = product && n >= count;
    const u32 feature = first + (up ? n - count : n);
    const u32 inside = (feature < p.outputs ? feature : p.outputs - 1) + (up ? p.outputs : 0);
    return static_cast<u64>(tile.group) * p.outputs * (product ? 2 : 1) + inside;
  }
};

__device__ inline float exponential(float v) {
#ifdef __CUDA_ARCH__
  return expf(v);
#else
  return std::exp(v);
#endif
}

// Writes one output: of a product with SiLU `sum` is the gate's, `up` the other's.
template <class T>
__device__ inline void matmul_store(const MatMulParams& p, u32 row, u32 feature, float sum, float up) {
  if (p.bias != nullptr) sum = add(sum, p.bias[feature]);
  if (p.flags & MATMUL_SILU_PRODUCT) sum = multiply(sum / add(1.0f, exponential(-sum)), up);
  const u64 at = static_cast<u64>(row) * p.outputs + feature;
  if (p.flags & MATMUL_OUT_F32) {
    static_cast<float*>(p.out)[at] = sum;
  } else {
    static_cast<T*>(p.out)[at] = from_float<T>(sum);
  }
}
