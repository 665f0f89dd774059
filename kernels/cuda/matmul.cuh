// Code shared by the matrix products: a block's rows and weights, and the destination of sums.
//
// out[i] = x[row_of[i]] W^T, with weights in checkpoint order: a feature's inputs are contiguous. A block has
// MATMUL_FEATURES features, or more, of one tile of up to MATMUL_TILE_ROWS rows. The division of an output's sum
// depends only on its inputs, so a row has the same bits in any tile and with any kernel for its type and shape.
//
// On tensor cores, weights are the A operand of mma.m16n8k16 (16 features) and rows of x the B operand (8 rows). The
// order of k within the product is free as long as both operands use the same: each lane of four has 16 bytes of a row,
// its part of two products over MATMUL_CHUNK inputs. K is split into eight ranges of equally many chunks; the sums of
// the ranges are added in order.
#pragma once
#include "compute.cuh"

constexpr u32 MATMUL_THREADS = 256;
constexpr u32 MATMUL_WARPS = MATMUL_THREADS / WARP;
constexpr u32 MATMUL_TILE_ROWS = 64;
constexpr u32 MATMUL_FEATURES_SHIFT = 4;
constexpr u32 MATMUL_FEATURES = 1u << MATMUL_FEATURES_SHIFT;

constexpr u32 MATMUL_CHUNK = 32;
constexpr u32 MATMUL_STRETCHES = MATMUL_WARPS;
constexpr u32 MATMUL_GROUP = 8;  // rows of one product

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

// Returns this block's tile. Numbers that fit neither weights nor rows are a bug of the caller: nothing may be written
// then.
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

// Returns the row of x for a row of the tile. Past the tile's last row it is the last row, which is computed again but
// never stored.
__device__ inline u32 matmul_source(const MatMulParams& p, const MatMulTile& tile, u32 row) {
  const u32 own = tile.first + (row < tile.rows ? row : tile.rows - 1);
  const u32 source = p.row_of == nullptr ? own : p.row_of[own];
  if (source >= p.x_rows) trap();
  return source;
}

// Indices of two rows of weights: features MATMUL_FEATURES / 2 apart, or gate and up of one feature.
struct MatMulFeatures {
  u32 shift;  // 2^shift: features of a block
  u32 count;
  u32 first;  // the block's first
  bool product;

  __device__ MatMulFeatures(const MatMulParams& p, u32 block) {
    product = (p.flags & MATMUL_SILU_PRODUCT) != 0;
    shift = product ? MATMUL_FEATURES_SHIFT - 1 : MATMUL_FEATURES_SHIFT;
    count = 1u << shift;
    first = block * count;
  }
  // Returns the block's n-th row of weights. Past the last feature it is the last row, which is computed again but
  // never stored.
  __device__ u64 weight_row(const MatMulParams& p, const MatMulTile& tile, u32 n) const {
    const bool up = product && n >= count;
    const u32 feature = first + (up ? n - count : n);
    const u32 inside = (feature < p.outputs ? feature : p.outputs - 1) + (up ? p.outputs : 0);
    return static_cast<u64>(tile.group) * p.outputs * (product ? 2 : 1) + inside;
  }
};

// Returns the number of chunks per range of K.
__device__ inline u32 matmul_stretch(const MatMulParams& p) {
  const u32 chunks = (p.inputs + MATMUL_CHUNK - 1) / MATMUL_CHUNK;
  return (chunks + MATMUL_STRETCHES - 1) / MATMUL_STRETCHES;
}

// A lane's part of A for one of the two products over a chunk, from rows of weights eight apart.
struct MatMulFragment {
  u32 a[4];

  __device__ MatMulFragment(const Vec& low, const Vec& high, u32 half)
      : a{low.w[2 * half], high.w[2 * half], low.w[2 * half + 1], high.w[2 * half + 1]} {}
};

// c += A B of one warp, for one half of a chunk: A 16 x 16 by rows, B 16 x 8 by columns.
__device__ inline void mma(float (&c)[4], const MatMulFragment& weights, const Vec& x, u32 half) {
  const u32 (&a)[4] = weights.a;
  const u32 b[2] = {x.w[2 * half], x.w[2 * half + 1]};
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  shim::mma(c, a, b);
#endif
}

__device__ inline float exponential(float v) {
#ifdef __CUDA_ARCH__
  return expf(v);
#else
  return std::exp(v);
#endif
}

// Writes one output. In a product with SiLU, `sum` is the gate's sum and `up` the other one.
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
