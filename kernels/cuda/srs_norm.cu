// Shuffled reduce-scatter fused with the layer's residual and RMSNorm: with h = sum over ranks + residual of the token, in f32,
// `residual_out[i] = round(h)` and `out[i] = round((h * inverse_rms(h)) * weight)`.
//
// It saves what two kernels behind the reduce-scatter would read and write: 2 N / P each. A block of 256 threads takes a row; each
// thread holds eight neighbouring columns of every 2,048. The order of the additions is that of the reference
// (`semmoe_kernels::inverse_rms`): columns of one thread, then neighbours, then warps.
#include "reduce.cuh"

constexpr u32 NORM_THREADS = 256;
constexpr u32 NORM_COLUMNS = 8;
constexpr u32 NORM_SPAN = NORM_THREADS * NORM_COLUMNS;

struct NormParams {
  ReduceParams reduce;             // `out` gets the normed rows
  const void* residual[MAX_LOCAL];  // [n, H], in the order of the tokens
  const void* weight[MAX_LOCAL];    // [H]
  void* residual_out[MAX_LOCAL];    // [capacity, H]
  float epsilon;
  u32 padding;
};

struct NormShared {
  float warp[NORM_THREADS / WARP];
};

__device__ inline float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
__device__ inline float square_root(float v) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(v);
#else
  return shim::square_root(v);
#endif
}

// Neighbours folded: of eight columns, of 32 lanes, of 8 warps. All threads get the sum.
__device__ inline float fold(float (&lanes)[NORM_COLUMNS], NormShared& shared) {
#pragma unroll
  for (u32 width = NORM_COLUMNS / 2; width > 0; width /= 2) {
#pragma unroll
    for (u32 i = 0; i < width; ++i) lanes[i] = add(lanes[2 * i], lanes[2 * i + 1]);
  }
  float sum = lanes[0];
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) sum = add(sum, __shfl_down_sync(ALL_LANES, sum, step));
  if (lane_id() == 0) shared.warp[warp_id()] = sum;
  __syncthreads();
  float warps[NORM_THREADS / WARP];
#pragma unroll
  for (u32 i = 0; i < NORM_THREADS / WARP; ++i) warps[i] = shared.warp[i];
#pragma unroll
  for (u32 width = NORM_THREADS / WARP / 2; width > 0; width /= 2) {
#pragma unroll
    for (u32 i = 0; i < width; ++i) warps[i] = add(warps[2 * i], warps[2 * i + 1]);
  }
  // The next row writes here again.
  __syncthreads();
  return warps[0];
}

template <class T>
__device__ inline Lanes<T> sum_vector(const ReduceParams& p, u64 element, u32 rank) {
  if (p.team.ranks == 2) {
    Vec v[2];
    load_peers<T, 2>(v, p.parts, element, rank);
    return sum_loaded<T, 2>(v, rank);
  }
  if (p.team.ranks == 4) {
    Vec v[4];
    load_peers<T, 4>(v, p.parts, element, rank);
    return sum_loaded<T, 4>(v, rank);
  }
  if (p.team.ranks == 8) {
    Vec v[8];
    load_peers<T, 8>(v, p.parts, element, rank);
    return sum_loaded<T, 8>(v, rank);
  }
  return sum_any<T>(p.parts, p.team.ranks, element);
}

// The counterpart of load16 and store16 for rows that are no multiple of 16 bytes: the elements before the end of the row.
template <class T>
__device__ inline void add_elements(Lanes<T>& sum, const void* from, u64 element, u32 column, u32 hidden, bool more = false) {
#pragma unroll
  for (u32 i = 0; i < Lanes<T>::COUNT; ++i) {
    if (column + i >= hidden) continue;
    const float value = to_float(static_cast<const T*>(from)[element + i]);
    sum.of[i] = more ? add(sum.of[i], value) : value;
  }
}
template <class T>
__device__ inline void store_elements(T* to, const Lanes<T>& lanes, u32 column, u32 hidden) {
#pragma unroll
  for (u32 i = 0; i < Lanes<T>::COUNT; ++i) {
    if (column + i < hidden) to[i] = from_float<T>(lanes.of[i]);
  }
}

// One row by one block; the values of a thread stay in SPANS x 8 registers.
template <class T, u32 SPANS>
__device__ inline void norm_row(const NormParams& n, const Meeting& meeting, u32 row, u32 token, NormShared& shared) {
  const ReduceParams& p = n.reduce;
  const u64 from = static_cast<u64>(token) * p.hidden;
  const u64 to = static_cast<u64>(row) * p.hidden;
  const T* residual = static_cast<const T*>(n.residual[blockIdx.y]);
  const T* weight = static_cast<const T*>(n.weight[blockIdx.y]);
  constexpr u32 COUNT = Lanes<T>::COUNT;
  const bool vectors = whole_vectors<T>(p.hidden);
  float h[SPANS][NORM_COLUMNS];
  float lanes[NORM_COLUMNS] = {};
#pragma unroll
  for (u32 span = 0; span < SPANS; ++span) {
    const u32 first = span * NORM_SPAN + threadIdx.x * NORM_COLUMNS;
#pragma unroll
    for (u32 part = 0; part < NORM_COLUMNS; part += COUNT) {
      const u32 column = first + part;
      Lanes<T> sum = {};
      if (vectors && column < p.hidden) {
        sum = sum_vector<T>(p, from + column, meeting.rank);
        accumulate<T>(sum, load16(residual + from + column));
        store16(static_cast<T*>(n.residual_out[blockIdx.y]) + to + column, pack<T>(sum));
      } else if (!vectors) {
        add_elements<T>(sum, p.parts[0], from + column, column, p.hidden);
        for (u32 rank = 1; rank < p.team.ranks; ++rank) add_elements<T>(sum, p.parts[rank], from + column, column, p.hidden, true);
        add_elements<T>(sum, residual, from + column, column, p.hidden, true);
        store_elements<T>(static_cast<T*>(n.residual_out[blockIdx.y]) + to + column, sum, column, p.hidden);
      }
#pragma unroll
      for (u32 i = 0; i < COUNT; ++i) {
        h[span][part + i] = sum.of[i];
        lanes[part + i] = add(lanes[part + i], multiply(sum.of[i], sum.of[i]));
      }
    }
  }
  const float mean = divide(fold(lanes, shared), static_cast<float>(p.hidden));
  const float scale = divide(1.0f, square_root(add(mean, n.epsilon)));
#pragma unroll
  for (u32 span = 0; span < SPANS; ++span) {
    const u32 first = span * NORM_SPAN + threadIdx.x * NORM_COLUMNS;
#pragma unroll
    for (u32 part = 0; part < NORM_COLUMNS; part += COUNT) {
      const u32 column = first + part;
      T* out = static_cast<T*>(p.out[blockIdx.y]) + to + column;
      if (vectors && column < p.hidden) {
        Lanes<T> normed = unpack<T>(load16(weight + column));
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) normed.of[i] = multiply(multiply(h[span][part + i], scale), normed.of[i]);
        store16(out, pack<T>(normed));
      } else if (!vectors) {
        Lanes<T> normed = {};
        add_elements<T>(normed, weight, column, column, p.hidden);
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) normed.of[i] = multiply(multiply(h[span][part + i], scale), normed.of[i]);
        store_elements<T>(out, normed, column, p.hidden);
      }
    }
  }
}

template <class T, u32 SPANS>
__device__ inline void norm_rows(const NormParams& n, const Meeting& meeting, const Rows& rows, NormShared& shared) {
  for (u32 row = blockIdx.x; row < rows.rows; row += gridDim.x) {
    const u32 token = token_at(meeting, n.reduce.permutation[blockIdx.y], rows.begin + row, n.reduce.tokens);
    norm_row<T, SPANS>(n, meeting, row, token, shared);
  }
}

template <class T>
__device__ inline void reduce_scatter_norm(const NormParams& n) {
  SEMMOE_SHARED(NormShared, shared);
  const ReduceParams& p = n.reduce;
  const Meeting meeting(p.team);
  meeting.enter(shape_digest(OP_REDUCE_NORM, p.tokens, p.hidden, sizeof(T)));
  const Rows rows(meeting, p.offsets[blockIdx.y], p.tokens, p.capacity);
  if (p.hidden <= 2 * NORM_SPAN) {
    norm_rows<T, 2>(n, meeting, rows, shared);
  } else {
    norm_rows<T, 4>(n, meeting, rows, shared);
  }
  meeting.leave();
}

SEMMOE_KERNEL(semmoe_srs_norm_f32, NormParams, NORM_THREADS) { reduce_scatter_norm<float>(p); }
SEMMOE_KERNEL(semmoe_srs_norm_f16, NormParams, NORM_THREADS) { reduce_scatter_norm<F16>(p); }
SEMMOE_KERNEL(semmoe_srs_norm_bf16, NormParams, NORM_THREADS) { reduce_scatter_norm<Bf16>(p); }
