// RMSNorm of rows, after an optional addition to the residual: `x = round(residual + added)` is written back, and `out
// = round(x * inverse_rms(x) * weight)`.
//
// A block norms a row. Its threads keep up to 16,384 bytes of a row in registers; they read the rest twice.
#include "rows.cuh"

constexpr u32 ROW_NORM_THREADS = 512;
constexpr u32 ROW_NORM_KEPT = 2;  // units of a thread

struct RowNormParams {
  void* residual;       // [sources, H]
  const void* added;    // [n, H]; null: none
  const u32* row_of;    // [n]: the rows to norm; null: the first n
  const float* weight;  // [H]
  void* out;            // [n, H]
  u32 rows;
  u32 sources;
  u32 hidden;
  float epsilon;
};

struct RowNormShared {
  float squares[ROW_NORM_THREADS / WARP];
};

template <class Access>
struct NormedRow {
  typedef typename Access::Element T;
  typedef typename Access::Values Values;

  const RowNormParams& p;
  T* residual;
  const T* added;
  T* out;
  u32 units;

  __device__ NormedRow(const RowNormParams& params, u32 source)
      : p(params),
        residual(row_at<T>(params.residual, source, params.hidden)),
        added(params.added == nullptr ? nullptr : row_at<T>(params.added, blockIdx.x, params.hidden)),
        out(row_at<T>(params.out, blockIdx.x, params.hidden)),
        units(params.hidden / Access::COUNT) {}

  __device__ static void add_squares(float& sum, const Values& values) {
#pragma unroll
    for (u32 i = 0; i < Access::COUNT; ++i) sum = add(sum, multiply(values.of[i], values.of[i]));
  }
  __device__ void sum_up(Values& values, const Values& more, u32 unit) const {
#pragma unroll
    for (u32 i = 0; i < Access::COUNT; ++i) values.of[i] = add(values.of[i], more.of[i]);
    values = Access::rounded(values);
    Access::store(residual, unit, values);
  }
  __device__ void store(Values values, const Values& weights, float scale, u32 unit) const {
#pragma unroll
    for (u32 i = 0; i < Access::COUNT; ++i) values.of[i] = multiply(multiply(values.of[i], scale), weights.of[i]);
    Access::store(out, unit, values);
  }

  // Returns one over the root of the mean of squares to all threads.
  __device__ float scale(float squares, RowNormShared& shared) const {
    squares = sum_lanes(squares);
    if (lane_id() == 0) shared.squares[warp_id()] = squares;
    __syncthreads();
    float sum = 0.0f;
    for (u32 warp = 0; warp < blockDim.x / WARP; ++warp) sum = add(sum, shared.squares[warp]);
    return 1.0f / sqrtf(add(sum / static_cast<float>(p.hidden), p.epsilon));
  }

  __device__ void run(RowNormShared& shared) const {
    Values kept[ROW_NORM_KEPT], more[ROW_NORM_KEPT], weights[ROW_NORM_KEPT];
    // All loads are issued before the first one is waited for.
#pragma unroll
    for (u32 j = 0; j < ROW_NORM_KEPT; ++j) {
      const u32 unit = threadIdx.x + j * blockDim.x;
      if (unit >= units) continue;
      kept[j] = Access::load(residual, unit);
      if (added != nullptr) more[j] = Access::load(added, unit);
      weights[j] = Access::floats(p.weight, unit);
    }
    float squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < ROW_NORM_KEPT; ++j) {
      const u32 unit = threadIdx.x + j * blockDim.x;
      if (unit >= units) continue;
      if (added != nullptr) sum_up(kept[j], more[j], unit);
      add_squares(squares, kept[j]);
    }
    const u32 rest = threadIdx.x + ROW_NORM_KEPT * blockDim.x;
    for (u32 unit = rest; unit < units; unit += blockDim.x) {
      Values values = Access::load(residual, unit);
      if (added != nullptr) sum_up(values, Access::load(added, unit), unit);
      add_squares(squares, values);
    }
    const float factor = scale(squares, shared);
#pragma unroll
    for (u32 j = 0; j < ROW_NORM_KEPT; ++j) {
      const u32 unit = threadIdx.x + j * blockDim.x;
      if (unit < units) store(kept[j], weights[j], factor, unit);
    }
    for (u32 unit = rest; unit < units; unit += blockDim.x) {
      store(Access::load(residual, unit), Access::floats(p.weight, unit), factor, unit);
    }
  }

  __device__ void refuse() const {
    for (u32 unit = threadIdx.x; unit < units; unit += blockDim.x) Access::store(out, unit, all_of<Access>(not_a_number()));
  }
};

template <class Access>
__device__ inline void norm_row(const RowNormParams& p) {
  SEMMOE_SHARED(RowNormShared, shared);
  if (blockIdx.x >= p.rows) return;
  const u32 source = p.row_of == nullptr ? blockIdx.x : p.row_of[blockIdx.x];
  const NormedRow<Access> row(p, source);
  source < p.sources ? row.run(shared) : row.refuse();
}

SEMMOE_KERNEL(semmoe_norm_f32, RowNormParams, ROW_NORM_THREADS) {
  whole_vectors<float>(p.hidden) ? norm_row<ByVector<float>>(p) : norm_row<ByElement<float>>(p);
}
SEMMOE_KERNEL(semmoe_norm_bf16, RowNormParams, ROW_NORM_THREADS) {
  whole_vectors<Bf16>(p.hidden) ? norm_row<ByVector<Bf16>>(p) : norm_row<ByElement<Bf16>>(p);
}
