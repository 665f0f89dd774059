// The bf16 matrix product on tensor cores, for few rows. It is bound by reading the weights, each once per tile of
// rows. Only sums go through shared memory: each of the block's warps has a range of K.
#include "matmul.cuh"

// Indexed by warp, accumulator, lane.
template <u32 GROUPS>
struct MatMulSums {
  float of[MATMUL_WARPS][4 * GROUPS][WARP];
};

// Computes one warp's sums over its range of K.
template <u32 GROUPS>
__device__ inline void matmul_sums(const MatMulParams& p, const MatMulTile& tile, float (&c)[GROUPS][4]) {
  // Chunks in flight: enough loads to hide the latency, but no more than fit in registers.
  constexpr u32 UNROLL = GROUPS <= 2 ? 4 : GROUPS == 4 ? 2 : 1;
  const u32 place = lane_id() / 4, vector = lane_id() % 4;
  const MatMulFeatures features(p, blockIdx.x);
  const Bf16* low = row_at<Bf16>(p.weights, features.weight_row(p, tile, place), p.inputs) + 8 * vector;
  const Bf16* high = row_at<Bf16>(p.weights, features.weight_row(p, tile, place + 8), p.inputs) + 8 * vector;
  const Bf16* x[GROUPS];
#pragma unroll
  for (u32 group = 0; group < GROUPS; ++group) {
    x[group] = row_at<Bf16>(p.x, matmul_source(p, tile, group * MATMUL_GROUP + place), p.x_stride) + 8 * vector;
  }
  const u32 stretch = matmul_stretch(p) * MATMUL_CHUNK;
  const u32 begin = warp_id() * stretch;
  const u32 end = begin + stretch < p.inputs ? begin + stretch : p.inputs;
#pragma unroll 1
  for (u32 first = begin; first < end; first += UNROLL * MATMUL_CHUNK) {
    Vec weights[UNROLL][2], rows[UNROLL][GROUPS];
#pragma unroll
    for (u32 j = 0; j < UNROLL; ++j) {
      const u32 k = first + j * MATMUL_CHUNK;
      // Inputs are whole vectors, so a vector is either inside or zero.
      const bool inside = k + 8 * vector < end;
      weights[j][0] = stream16_or_zero(low + k, inside);
      weights[j][1] = stream16_or_zero(high + k, inside);
#pragma unroll
      for (u32 group = 0; group < GROUPS; ++group) rows[j][group] = cached16_or_zero(x[group] + k, inside);
    }
#pragma unroll
    for (u32 j = 0; j < UNROLL; ++j) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const MatMulFragment fragment(weights[j][0], weights[j][1], half);
#pragma unroll
        for (u32 group = 0; group < GROUPS; ++group) mma(c[group], fragment, rows[j][group], half);
      }
    }
  }
}

// Adds the sums of the warps, in their order.
template <u32 GROUPS>
__device__ inline void matmul_few(const MatMulParams& p, const MatMulTile& tile, float (*sums)[WARP], u32 stride) {
  float c[GROUPS][4] = {};
  matmul_sums<GROUPS>(p, tile, c);
#pragma unroll
  for (u32 i = 0; i < 4 * GROUPS; ++i) sums[warp_id() * stride + i][lane_id()] = c[i / 4][i % 4];
  __syncthreads();
  const MatMulFeatures features(p, blockIdx.x);
  for (u32 i = threadIdx.x; i < features.count * tile.rows; i += blockDim.x) {
    const u32 row = i >> features.shift, feature = i & (features.count - 1);
    if (features.first + feature >= p.outputs) continue;
    // The lane and accumulator of this sum: a lane of four has two columns, which are rows of x, and two features eight
    // apart.
    const u32 lane = feature % 8 * 4 + row % MATMUL_GROUP / 2;
    const u32 own = row / MATMUL_GROUP * 4 + feature / 8 * 2 + row % 2;
    float sum = 0.0f, up = 0.0f;
#pragma unroll
    for (u32 warp = 0; warp < MATMUL_WARPS; ++warp) {
      sum = add(sum, sums[warp * stride + own][lane]);
      if (features.product) up = add(up, sums[warp * stride + own + 2][lane]);
    }
    matmul_store<Bf16>(p, tile.first + row, features.first + feature, sum, up);
  }
}

// Tiles of up to 8 GROUPS rows.
template <u32 GROUPS>
__device__ inline void matmul_bf16(const MatMulParams& p) {
  SEMMOE_SHARED(MatMulSums<GROUPS>, shared);
  const MatMulTile tile = matmul_tile(p);
  if (tile.rows == 0) return;
  if (tile.rows > MATMUL_GROUP * GROUPS) trap();
  float (*sums)[WARP] = &shared.of[0][0];
  constexpr u32 stride = 4 * GROUPS;
  if (tile.rows <= MATMUL_GROUP) return matmul_few<1>(p, tile, sums, stride);
  if constexpr (GROUPS >= 2) {
    if (tile.rows <= 2 * MATMUL_GROUP) return matmul_few<2>(p, tile, sums, stride);
  }
  if constexpr (GROUPS >= 8) {
    if (tile.rows <= 4 * MATMUL_GROUP) return matmul_few<4>(p, tile, sums, stride);
    return matmul_few<8>(p, tile, sums, stride);
  }
}

SEMMOE_KERNEL(semmoe_matmul_bf16_8, MatMulParams, MATMUL_THREADS) { matmul_bf16<1>(p); }
SEMMOE_KERNEL(semmoe_matmul_bf16_16, MatMulParams, MATMUL_THREADS) { matmul_bf16<2>(p); }
SEMMOE_KERNEL(semmoe_matmul_bf16_64, MatMulParams, MATMUL_THREADS) { matmul_bf16<8>(p); }
