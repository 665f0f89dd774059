// The matrix product without tensor cores: in f32, and in bf16 if rows are not whole vectors. Each warp has two rows of
// weights, with its lanes along K, and processes eight rows of x at a time; the lanes' sums are added in order.
#include "matmul.cuh"

constexpr u32 PLAIN_ROWS = 8;  // at a time

struct PlainSums {
  // Indexed by warp, row of weights and row of x, lane. One element more than lanes, so that columns are read without
  // bank conflicts.
  float of[MATMUL_WARPS][2 * PLAIN_ROWS][WARP + 1];
};

// The unit of a row that a lane reads: a vector, or one element.
template <class T>
struct PlainVectors {
  static constexpr u32 COUNT = Lanes<T>::COUNT;
  __device__ static Lanes<T> load(const T* from) { return unpack<T>(cached16(from)); }
};
template <class T>
struct PlainElements {
  static constexpr u32 COUNT = 1;
  struct One {
    float of[1];
  };
  __device__ static One load(const T* from) { return One{{to_float(*from)}}; }
};

template <class T, class Access>
__device__ inline void plain_rows(const MatMulParams& p, const MatMulTile& tile, u32 first_row, float (*sums)[WARP + 1]) {
  const MatMulFeatures features(p, blockIdx.x);
  // The two rows are eight apart in the block, so that gate and up of a feature belong to one warp.
  const T* weights[2];
#pragma unroll
  for (u32 n = 0; n < 2; ++n) {
    weights[n] = row_at<T>(p.weights, features.weight_row(p, tile, warp_id() + n * MATMUL_WARPS), p.inputs);
  }
  const T* x[PLAIN_ROWS];
#pragma unroll
  for (u32 row = 0; row < PLAIN_ROWS; ++row) x[row] = row_at<T>(p.x, matmul_source(p, tile, first_row + row), p.x_stride);
  float c[2][PLAIN_ROWS] = {};
  for (u32 k = lane_id() * Access::COUNT; k < p.inputs; k += WARP * Access::COUNT) {
    const auto low = Access::load(weights[0] + k), high = Access::load(weights[1] + k);
#pragma unroll
    for (u32 row = 0; row < PLAIN_ROWS; ++row) {
      const auto values = Access::load(x[row] + k);
#pragma unroll
      for (u32 i = 0; i < Access::COUNT; ++i) {
        c[0][row] = fused(low.of[i], values.of[i], c[0][row]);
        c[1][row] = fused(high.of[i], values.of[i], c[1][row]);
      }
    }
  }
#pragma unroll
  for (u32 i = 0; i < 2 * PLAIN_ROWS; ++i) sums[i][lane_id()] = c[i / PLAIN_ROWS][i % PLAIN_ROWS];
}

__device__ inline float plain_sum(const float (&lanes)[WARP + 1]) {
  float sum = 0.0f;
#pragma unroll
  for (u32 lane = 0; lane < WARP; ++lane) sum = add(sum, lanes[lane]);
  return sum;
}

template <class T, class Access>
__device__ inline void matmul_plain(const MatMulParams& p) {
  SEMMOE_SHARED(PlainSums, shared);
  const MatMulTile tile = matmul_tile(p);
  const MatMulFeatures features(p, blockIdx.x);
  for (u32 first_row = 0; first_row < tile.rows; first_row += PLAIN_ROWS) {
    // The previous rows' sums have been read.
    if (first_row != 0) __syncthreads();
    plain_rows<T, Access>(p, tile, first_row, shared.of[warp_id()]);
    __syncthreads();
    const u32 left = tile.rows - first_row;
    const u32 rows = left < PLAIN_ROWS ? left : PLAIN_ROWS;
    for (u32 i = threadIdx.x; i < features.count * rows; i += blockDim.x) {
      const u32 row = i >> features.shift, feature = i & (features.count - 1);
      if (features.first + feature >= p.outputs) continue;
      const u32 warp = feature % MATMUL_WARPS, n = feature / MATMUL_WARPS;
      const float sum = plain_sum(shared.of[warp][n * PLAIN_ROWS + row]);
      const float up = features.product ? plain_sum(shared.of[warp][PLAIN_ROWS + row]) : 0.0f;
      matmul_store<T>(p, tile.first + first_row + row, features.first + feature, sum, up);
    }
  }
}

SEMMOE_KERNEL(semmoe_matmul_f32, MatMulParams, MATMUL_THREADS) { matmul_plain<float, PlainVectors<float>>(p); }
SEMMOE_KERNEL(semmoe_matmul_any_f32, MatMulParams, MATMUL_THREADS) { matmul_plain<float, PlainElements<float>>(p); }
SEMMOE_KERNEL(semmoe_matmul_any_bf16, MatMulParams, MATMUL_THREADS) { matmul_plain<Bf16, PlainElements<Bf16>>(p); }
