// The bf16 matrix product on tensor cores, for many rows: 128 rows of weights and a tile of x go through shared memory,
// in four stages of one chunk of K each, so that several warps use every byte from the cache. A warp has 32 rows of
// each. The sums equal those of the kernel for few rows, bit for bit.
#include "matmul.cuh"

constexpr u32 MANY_STAGES = 4;
constexpr u32 MANY_WEIGHTS = 128;
constexpr u32 MANY_BLOCKS = MANY_WEIGHTS / MATMUL_FEATURES;  // of the kernel for few rows
constexpr u32 MANY_ACROSS = 2;                               // products of a warp along features
constexpr u32 MANY_DOWN = 4;                                 // and along rows
constexpr u32 MANY_ROWS = MANY_DOWN * MATMUL_GROUP;
constexpr u32 MANY_WARPS_ACROSS = MANY_WEIGHTS / (MANY_ACROSS * MATMUL_FEATURES);

constexpr u32 MANY_STAGE = (MANY_WEIGHTS + MATMUL_TILE_ROWS) * 4;  // vectors

struct ManyShared {
  // Indexed by stage, row of weights and then of x, vector of the chunk.
  Vec of[MANY_STAGES * MANY_STAGE];
};

// Starts a copy of 16 bytes into shared memory that completes before `arrived` returns; zeros if not `inside`.
__device__ inline void begin_copy16(Vec* to, const void* from, bool inside) {
#ifdef __CUDA_ARCH__
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(inside ? 16 : 0) : "memory");
#else
  *to = inside ? shim::load<Vec>(from) : Vec{};
#endif
}
__device__ inline void end_stage() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for all stages that this thread started except the last ones.
__device__ inline void stages_arrived() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(MANY_STAGES - 2) : "memory");
#endif
}

// A thread's copies for each chunk: a vector of two rows of weights and of one row of x.
struct ManyCopies {
  const Bf16* from[3];
  u32 to;  // the vector in the first of the rows, by stage
  u32 k;   // of the vector in the next chunk

  __device__ ManyCopies(const MatMulParams& p, const MatMulTile& tile) {
    const u32 row = threadIdx.x / 4;
    to = threadIdx.x;
    k = 8 * (threadIdx.x % 4);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const u32 n = row + i * MATMUL_TILE_ROWS;
      const MatMulFeatures features(p, blockIdx.x * MANY_BLOCKS + n / MATMUL_FEATURES);
      from[i] = row_at<Bf16>(p.weights, features.weight_row(p, tile, n % MATMUL_FEATURES), p.inputs) + k;
    }
    from[2] = row_at<Bf16>(p.x, matmul_source(p, tile, row), p.x_stride) + k;
  }

  // After the last chunk nothing is copied. Inputs are whole vectors, so a vector is either inside or zero.
  __device__ void begin_next(const MatMulParams& p, Vec* stages) {
    if (k / MATMUL_CHUNK * MATMUL_CHUNK < p.inputs) {
#pragma unroll
      for (u32 i = 0; i < 3; ++i) {
        begin_copy16(stages + to + i * 4 * MATMUL_TILE_ROWS, from[i], k < p.inputs);
        from[i] += MATMUL_CHUNK;
      }
    }
    end_stage();
    k += MATMUL_CHUNK;
    to += MANY_STAGE;
    if (to >= MANY_STAGES * MANY_STAGE) to -= MANY_STAGES * MANY_STAGE;
  }
};

// The sums of a warp, whose lanes each have one vector of eight rows: for the current range of K, and for all earlier
// ranges.
struct ManySums {
  float stretch[MANY_ACROSS][MANY_DOWN][4];
  float all[MANY_ACROSS][MANY_DOWN][4];

  __device__ ManySums() : stretch{}, all{} {}

  __device__ void add_chunk(const Vec* weights, const Vec* rows) {
    Vec x[MANY_DOWN];
#pragma unroll
    for (u32 j = 0; j < MANY_DOWN; ++j) x[j] = rows[j * MATMUL_GROUP * 4];
#pragma unroll
    for (u32 i = 0; i < MANY_ACROSS; ++i) {
      const Vec low = weights[i * MATMUL_FEATURES * 4];
      const Vec high = weights[(i * MATMUL_FEATURES + 8) * 4];
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const MatMulFragment fragment(low, high, half);
#pragma unroll
        for (u32 j = 0; j < MANY_DOWN; ++j) mma(stretch[i][j], fragment, x[j], half);
      }
    }
  }
  __device__ void end_stretch() {
#pragma unroll
    for (u32 i = 0; i < MANY_ACROSS; ++i) {
#pragma unroll
      for (u32 j = 0; j < MANY_DOWN; ++j) {
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
          all[i][j][c] = add(all[i][j][c], stretch[i][j][c]);
          stretch[i][j][c] = 0.0f;
        }
      }
    }
  }
  // A lane has two rows of x, and for each of them two rows of weights, eight apart.
  __device__ void store(const MatMulParams& p, const MatMulTile& tile, u32 first_block, u32 first_row) const {
#pragma unroll
    for (u32 i = 0; i < MANY_ACROSS; ++i) {
      const MatMulFeatures features(p, first_block + i);
      const u32 feature = features.first + lane_id() / 4;
#pragma unroll
      for (u32 j = 0; j < MANY_DOWN; ++j) {
#pragma unroll
        for (u32 c = 0; c < 2; ++c) {
          const u32 row = first_row + j * MATMUL_GROUP + lane_id() % 4 * 2 + c;
          if (row >= tile.rows) continue;
          if (feature < p.outputs) matmul_store<Bf16>(p, tile.first + row, feature, all[i][j][c], all[i][j][c + 2]);
          if (features.product || feature + 8 >= p.outputs) continue;
          matmul_store<Bf16>(p, tile.first + row, feature + 8, all[i][j][c + 2], 0.0f);
        }
      }
    }
  }
};

SEMMOE_KERNEL(semmoe_matmul_bf16_many, MatMulParams, MATMUL_THREADS) {
  SEMMOE_SHARED(ManyShared, shared);
  const MatMulTile tile = matmul_tile(p);
  if (tile.rows == 0) return;
  const u32 across = warp_id() % MANY_WARPS_ACROSS, first_row = warp_id() / MANY_WARPS_ACROSS * MANY_ROWS;
  const bool any_row = first_row < tile.rows;
  ManyCopies copies(p, tile);
  for (u32 stage = 0; stage < MANY_STAGES - 1; ++stage) copies.begin_next(p, shared.of);
  ManySums sums;
  const u32 stretch = matmul_stretch(p);
  u32 left = stretch;
  // Four lanes have the vectors of a row, so that a warp reads eight contiguous rows.
  u32 weights = across * MANY_ACROSS * MATMUL_FEATURES * 4 + lane_id();
  const u32 rows = (MANY_WEIGHTS + first_row) * 4 + lane_id() - weights;
#pragma unroll 1
  for (u32 k = 0; k < p.inputs; k += MATMUL_CHUNK) {
    stages_arrived();
    // All threads' copies have arrived, and no warp still uses the previous chunk, whose stage the next copies fill.
    __syncthreads();
    copies.begin_next(p, shared.of);
    if (any_row) sums.add_chunk(shared.of + weights, shared.of + weights + rows);
    weights += MANY_STAGE;
    if (weights >= MANY_STAGES * MANY_STAGE) weights -= MANY_STAGES * MANY_STAGE;
    if (--left == 0) {
      sums.end_stretch();
      left = stretch;
    }
  }
  // The last range may be shorter.
  sums.end_stretch();
  sums.store(p, tile, blockIdx.x * MANY_BLOCKS + across * MANY_ACROSS, first_row);
}
