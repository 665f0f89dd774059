// Causal attention over pages: a partial result for each split of 256 keys, then the merge of the partial results.
//
// bf16 with whole vectors uses the tensor cores, both products straight from the pages (tensor.cuh); each weight is the
// sum of two bf16, which loses no more than 2^-16. Everything else uses plain multiplications.
#include "attend.cuh"
#include "tensor.cuh"

// Scores and weighted values on the tensor cores.
template <u32 TILES>
struct TensorProducts {
  typedef Bf16 T;
  // Number of pieces of 16 x 64 elements whose loads are in flight together.
  static constexpr u32 AHEAD = 4 / TILES;

  // The run's queries, `[d, n]`.
  __device__ static RightPart queries(const SplitOfRun<TILES>& of, u32 tile, u32 d) {
    const u32 query = tile * QUERY_TILE + lane_row();
    if (query >= of.run.queries || d >= of.p.dim) return {};
    return load8(static_cast<const T*>(of.p.queries) + of.run.query_at(of.p, query) * of.p.dim + d);
  }
  __device__ static RightPart load8(const T* from) {
#ifdef __CUDA_ARCH__
    const uint2 pair = *reinterpret_cast<const uint2*>(from);
    return {{pair.x, pair.y}};
#else
    return shim::load<RightPart>(from);
#endif
  }

  __device__ static void score(const SplitOfRun<TILES>& of, const RunPage& page, float (&sums)[TILES][4][4]) {
    const T* keys = page.keys<T>(of.p, of.run.kv_head) + 8 * lane_row();
    for (u32 begin = 0; begin < of.p.dim; begin += AHEAD * PRODUCT_K) {
      Vec left[AHEAD][4];
      RightPart right[AHEAD][TILES];
#pragma unroll
      for (u32 step = 0; step < AHEAD; ++step) {
        const u32 d = begin + step * PRODUCT_K + 4 * lane_step();
#pragma unroll
        for (u32 i = 0; i < 4; ++i) left[step][i] = stream16_or_zero(keys + (d + i) * ATTEND_PAGE, d < of.p.dim);
#pragma unroll
        for (u32 tile = 0; tile < TILES; ++tile) right[step][tile] = queries(of, tile, d);
      }
#pragma unroll
      for (u32 step = 0; step < AHEAD; ++step) multiply_columns<TILES>(sums, left[step], right[step]);
    }
  }

  // Converts scores to weights of the page's keys for one of this lane's queries: 2 t + e of a tile.
  __device__ static void weigh(const SplitOfRun<TILES>& of, const RunPage& page, float (&sums)[4][4], u32 tile, u32 e) {
    const u32 query = tile * QUERY_TILE + 2 * lane_step() + e;
    const bool counts = query < of.run.queries;
    const u32 sees = counts ? position_of(of.p, of.run.row(of.p, query)) + 1 : 0;
    float scores[8];
    float largest = minus_infinity();
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const float score = page.is_lost() ? not_a_number() : multiply(sums[i / 2][i % 2 * 2 + e], of.p.scale);
      scores[i] = page.begins + 8 * lane_row() + i < sees ? score : minus_infinity();
      largest = larger_score(largest, scores[i]);
    }
#pragma unroll
    for (u32 step = 4; step < WARP; step *= 2) largest = larger_score(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    float total = 0.0f;
    Vec packed[2];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const float weight = is_nothing(largest) ? 0.0f : exp2_of(add(scores[i], -largest));
      total = add(total, weight);
      const Bf16 high = from_float<Bf16>(weight);
      const Bf16 low = from_float<Bf16>(add(weight, -to_float(high)));
      packed[i / 4].w[i % 4] = high.bits | static_cast<u32>(low.bits) << 16;
    }
#pragma unroll
    for (u32 step = 4; step < WARP; step *= 2) total = add(total, __shfl_xor_sync(ALL_LANES, total, step));
    Vec* weights = of.shared.weights[warp_id()][query];
    weights[2 * lane_row()] = packed[0];
    weights[2 * lane_row() + 1] = packed[1];
    if (lane_row() != 0) return;
    of.shared.largest[warp_id()][query] = largest;
    of.shared.totals[warp_id()][query] = total;
  }

  // Computes the weighted values of 64 columns; columns and keys that the page lacks are 0.
  __device__ static void sum_up(const SplitOfRun<TILES>& of, const RunPage& page, u32 column, float (&sums)[TILES][4][4]) {
    const T* values = page.values<T>(of.p, of.run.kv_head) + column + 8 * lane_row();
    const u32 held = page.is_lost() || column + 8 * lane_row() >= of.p.dim ? 0 : page.held;
    for (u32 begin = 0; begin < page.held; begin += AHEAD * PRODUCT_K) {
      Vec left[AHEAD][4];
#pragma unroll
      for (u32 step = 0; step < AHEAD; ++step) {
        const u32 key = begin + step * PRODUCT_K + 4 * lane_step();
#pragma unroll
        for (u32 i = 0; i < 4; ++i) left[step][i] = stream16_or_zero(values + (key + i) * of.p.dim, key + i < held);
      }
#pragma unroll
      for (u32 step = 0; step < AHEAD; ++step) {
        const u32 key = begin + step * PRODUCT_K + 4 * lane_step();
        RightPart high[TILES], low[TILES];
#pragma unroll
        for (u32 tile = 0; tile < TILES; ++tile) {
          const Vec& packed = of.shared.weights[warp_id()][tile * QUERY_TILE + lane_row()][key / 4];
          high[tile] = {{lower_halves(packed.w[0], packed.w[1]), lower_halves(packed.w[2], packed.w[3])}};
          low[tile] = {{upper_halves(packed.w[0], packed.w[1]), upper_halves(packed.w[2], packed.w[3])}};
        }
        multiply_columns<TILES>(sums, left[step], low);
        multiply_columns<TILES>(sums, left[step], high);
      }
    }
  }

  // Prefetches the values while keys are multiplied.
  __device__ static void expect(const SplitOfRun<TILES>& of, const RunPage& page) {
    const T* values = page.values<T>(of.p, of.run.kv_head);
    const u32 held = page.is_lost() ? 0 : page.held;
    for (u32 at = lane_id() * EXPECTED; at < held * of.p.dim; at += WARP * EXPECTED) prefetch(values + at);
  }
  static constexpr u32 EXPECTED = 128 / sizeof(T);

  // Merges the four pages' sums of one tile.
  __device__ static void settle(const SplitOfRun<TILES>& of, u32 tile, u32 first_column, const float (&sums)[4][4]) {
#pragma unroll
    for (u32 e = 0; e < 2; ++e) {
      float* to = of.shared.values[warp_id()][2 * lane_step() + e] + 8 * lane_row();
#pragma unroll
      for (u32 i = 0; i < 8; ++i) to[i] = sums[i / 2][i % 2 * 2 + e];
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < QUERY_TILE * VALUE_COLUMNS; at += ATTEND_THREADS) {
      const u32 in_tile = at / VALUE_COLUMNS, column = at % VALUE_COLUMNS;
      const u32 query = tile * QUERY_TILE + in_tile;
      if (query >= of.run.queries || first_column + column >= of.p.dim) continue;
      const SplitPart<TILES> part(of.shared, query);
      float value = 0.0f;
#pragma unroll
      for (u32 page = 0; page < SPLIT_PAGES; ++page) value = fused(of.shared.values[page][in_tile][column], part.of[page], value);
      of.settle(query, first_column + column, value, part);
    }
    // The next columns' sums reuse this memory.
    __syncthreads();
  }

  __device__ static void run(const SplitOfRun<TILES>& of) {
    const RunPage page(of.p, of.run, of.split * SPLIT_PAGES + warp_id());
    expect(of, page);
    {
      float sums[TILES][4][4] = {};
      if (page.held != 0 && !page.is_lost()) score(of, page, sums);
#pragma unroll
      for (u32 tile = 0; tile < TILES; ++tile) {
        weigh(of, page, sums[tile], tile, 0);
        weigh(of, page, sums[tile], tile, 1);
      }
    }
    __syncwarp(ALL_LANES);
    for (u32 column = 0; column < of.p.dim; column += VALUE_COLUMNS) {
      float sums[TILES][4][4] = {};
      sum_up(of, page, column, sums);
#pragma unroll
      for (u32 tile = 0; tile < TILES; ++tile) {
        if (tile * QUERY_TILE < of.run.queries) settle(of, tile, column, sums[tile]);
      }
    }
    of.end();
  }
};

// Scores and weighted values by plain multiplications, for any type and width.
template <class T>
struct PlainProducts {
  typedef SplitOfRun<1> Split;

  __device__ static void score(const Split& of, const RunPage& page) {
    float scores[QUERY_TILE][2] = {};
    // Starts at the first query.
    const T* queries = static_cast<const T*>(of.p.queries) + of.run.query_at(of.p, 0) * of.p.dim;
    u32 offsets[QUERY_TILE];
#pragma unroll
    for (u32 i = 0; i < QUERY_TILE; ++i) {
      const u32 query = i < of.run.queries ? i : 0;
      offsets[i] = static_cast<u32>(of.run.query_at(of.p, query) - of.run.query_at(of.p, 0)) * of.p.dim;
    }
    if (page.held != 0 && !page.is_lost()) {
      const T* keys = page.keys<T>(of.p, of.run.kv_head);
#pragma unroll 2
      for (u32 d = 0; d < of.p.dim; ++d) {
        const float first = to_float(keys[d * ATTEND_PAGE + lane_id()]);
        const float second = to_float(keys[d * ATTEND_PAGE + WARP + lane_id()]);
#pragma unroll
        for (u32 i = 0; i < QUERY_TILE; ++i) {
          const float query = to_float(queries[offsets[i] + d]);
          scores[i][0] = fused(query, first, scores[i][0]);
          scores[i][1] = fused(query, second, scores[i][1]);
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < QUERY_TILE; ++i) {
      const u32 sees = i < of.run.queries ? position_of(of.p, of.run.row(of.p, i)) + 1 : 0;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const float score = page.is_lost() ? not_a_number() : multiply(scores[i][half], of.p.scale);
        const u32 key = half * WARP + lane_id();
        weights_of(of, warp_id(), i)[key] = page.begins + key < sees ? score : minus_infinity();
      }
    }
  }
  __device__ static float* weights_of(const Split& of, u32 page, u32 query) {
    return reinterpret_cast<float*>(of.shared.weights[page][query]);
  }

  // Four lanes compute the weights of one query's scores.
  __device__ static void weigh(const Split& of) {
    const u32 query = lane_id() / 4;
    float* weights = weights_of(of, warp_id(), query) + lane_id() % 4;
    float largest = minus_infinity();
    for (u32 key = 0; key < ATTEND_PAGE; key += 4) largest = larger_score(largest, weights[key]);
    largest = larger_score(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = larger_score(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    float total = 0.0f;
    for (u32 key = 0; key < ATTEND_PAGE; key += 4) {
      weights[key] = is_nothing(largest) ? 0.0f : exp2_of(add(weights[key], -largest));
      total = add(total, weights[key]);
    }
    total = add(total, __shfl_xor_sync(ALL_LANES, total, 1));
    total = add(total, __shfl_xor_sync(ALL_LANES, total, 2));
    if (lane_id() % 4 != 0) return;
    of.shared.largest[warp_id()][query] = largest;
    of.shared.totals[warp_id()][query] = total;
  }

  __device__ static void sum_up(const Split& of, u32 column, float (&values)[QUERY_TILE]) {
    for (u32 warp = 0; warp < SPLIT_PAGES; ++warp) {
      const RunPage page(of.p, of.run, of.split * SPLIT_PAGES + warp);
      if (page.held == 0) continue;
      float sums[QUERY_TILE] = {};
      const T* from = page.values<T>(of.p, of.run.kv_head) + column;
#pragma unroll 2
      for (u32 key = 0; key < page.held; ++key) {
        const float value = page.is_lost() ? not_a_number() : to_float(from[key * of.p.dim]);
#pragma unroll
        for (u32 i = 0; i < QUERY_TILE; ++i) sums[i] = fused(weights_of(of, warp, i)[key], value, sums[i]);
      }
#pragma unroll
      for (u32 i = 0; i < QUERY_TILE; ++i) {
        const SplitPart<1> part(of.shared, i);
        values[i] = fused(sums[i], part.of[warp], values[i]);
      }
    }
  }

  __device__ static void run(const Split& of) {
    const RunPage page(of.p, of.run, of.split * SPLIT_PAGES + warp_id());
    score(of, page);
    __syncwarp(ALL_LANES);
    weigh(of);
    __syncthreads();
    for (u32 column = threadIdx.x; column < of.p.dim; column += ATTEND_THREADS) {
      float values[QUERY_TILE] = {};
      sum_up(of, column, values);
#pragma unroll
      for (u32 i = 0; i < QUERY_TILE; ++i) {
        if (i < of.run.queries) of.settle(i, column, values[i], SplitPart<1>(of.shared, i));
      }
    }
    of.end();
  }
};

// Merges a row's partial results in ascending order and divides by the sum of weights. One thread per value.
template <class T>
__device__ inline void merge_parts(const AttendParams& p) {
  const u32 row = blockIdx.y;
  const u32 width = p.kv_heads * p.group * p.dim;
  const u32 column = unit_in_row();
  if (row >= p.rows || column >= width) return;
  const u32 position = p.positions[row];
  const u32 parts = p.slots == 1 ? 1 : position_of(p, row) / SPLIT_KEYS + 1;
  const float* values = p.values + static_cast<u64>(row) * p.slots * width + column;
  const float* totals = p.totals + (static_cast<u64>(row) * p.slots * (width / p.dim) + column / p.dim) * 2;
  float largest = totals[0], total = totals[1], value = values[0];
#pragma unroll 4
  for (u32 part = 1; part < parts; ++part) {
    const float* next = totals + static_cast<u64>(part) * (width / p.dim) * 2;
    const Fold fold(largest, next[0]);
    largest = fold.largest;
    total = fold(total, next[1]);
    value = fold(value, values[static_cast<u64>(part) * width]);
  }
  // A position beyond `longest` has more keys than were read.
  const float result = position > p.longest ? not_a_number() : value / total;
  row_at<T>(p.out, row, width)[column] = from_float<T>(result);
}

SEMMOE_KERNEL(semmoe_attend_f32, AttendParams, ATTEND_THREADS) { attend<PlainProducts<float>, 1>(p); }
SEMMOE_KERNEL(semmoe_attend_bf16, AttendParams, ATTEND_THREADS) { attend<PlainProducts<Bf16>, 1>(p); }
SEMMOE_KERNEL(semmoe_attend_bf16_8, AttendParams, ATTEND_THREADS) { attend<TensorProducts<1>, 1>(p); }
SEMMOE_KERNEL(semmoe_attend_bf16_16, AttendParams, ATTEND_THREADS) { attend<TensorProducts<2>, 2>(p); }
SEMMOE_KERNEL(semmoe_attend_bf16_32, AttendParams, ATTEND_THREADS) { attend<TensorProducts<4>, 4>(p); }
SEMMOE_KERNEL(semmoe_attend_merge_f32, AttendParams, MERGE_THREADS) { merge_parts<float>(p); }
SEMMOE_KERNEL(semmoe_attend_merge_bf16, AttendParams, MERGE_THREADS) { merge_parts<Bf16>(p); }
