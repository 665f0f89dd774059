// Shuffled reduce-scatter fused with the layer's residual and RMSNorm: with h = sum over ranks + residual of the token,
// in f32, `residual_out[i] = round(h)` and `out[i] = round((h * inverse_rms(h)) * weight)`.
//
// It saves the memory traffic of two kernels after the reduce-scatter, 2 N / P each. Two blocks share a multiprocessor,
// and with two ranks a block processes two rows at once, so that enough loads are in flight while others wait at the
// barrier. Each thread has eight adjacent columns of every 2,048. The additions are those of the reference
// (`semmoe_kernels::inverse_rms`): columns of one thread, then adjacent threads, then warps.
#include "reduce.cuh"

constexpr u32 NORM_THREADS = 256;
constexpr u32 NORM_WARPS = NORM_THREADS / WARP;
constexpr u32 NORM_COLUMNS = 8;
constexpr u32 NORM_SPAN = NORM_THREADS * NORM_COLUMNS;
constexpr u32 NORM_ROWS = 2;  // of a block at once, at most

struct NormParams {
  ReduceParams reduce;             // `out` gets the normed rows
  const void* residual[MAX_LOCAL];  // [n, H], in the order of the tokens
  const void* weight[MAX_LOCAL];    // [H]
  void* residual_out[MAX_LOCAL];    // [capacity, H]
  float epsilon;
  u32 padding;
};

struct NormShared {
  float squares[2][NORM_ROWS][NORM_WARPS];  // by parity of the round, row, warp
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

// Adds neighbours, then their sums.
template <u32 COUNT>
__device__ inline float fold(float (&values)[COUNT]) {
#pragma unroll
  for (u32 width = COUNT / 2; width > 0; width /= 2) {
#pragma unroll
    for (u32 i = 0; i < width; ++i) values[i] = add(values[2 * i], values[2 * i + 1]);
  }
  return values[0];
}
// Folds over a warp's lanes. Since a + b is b + a, all lanes get the same sum.
__device__ inline float fold_lanes(float value) {
#pragma unroll
  for (u32 step = 1; step < WARP; step *= 2) value = add(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

// Whole vectors, from RANKS ranks at once; if RANKS is 0, from any number.
template <class T, u32 RANKS>
struct NormVectors {
  // Vectors of a thread in flight.
  static constexpr u32 AT_ONCE = RANKS == 2 ? 2 : 1;
  struct Loaded {
    Vec peers[RANKS == 0 ? 1 : RANKS];
    Vec residual;
  };

  __device__ static void load(Loaded& loaded, const ReduceParams& p, const T* residual, u32 rank, u64 element) {
    if constexpr (RANKS != 0) load_peers<T, RANKS>(loaded.peers, p.parts, element, rank);
    loaded.residual = load16(residual + element);
  }
  __device__ static Lanes<T> sum(Loaded& loaded, const ReduceParams& p, const T*, u32 rank, u64 element, u32) {
    Lanes<T> sum;
    if constexpr (RANKS != 0) {
      sum = sum_loaded<T, RANKS>(loaded.peers, rank);
    } else {
      sum = sum_any<T>(p.parts, p.team.ranks, element);
    }
    accumulate<T>(sum, loaded.residual);
    return sum;
  }
  __device__ static Lanes<T> weight(const T* from, u32 column, u32) { return unpack<T>(load16(from + column)); }
  __device__ static void store(T* to, const Lanes<T>& lanes, u32 column, u32) { store16(to + column, pack<T>(lanes)); }
};

// Rows whose width is not a multiple of 16 bytes: element by element, up to the end of the row.
template <class T>
struct NormElements {
  static constexpr u32 AT_ONCE = 1;
  struct Loaded {};

  __device__ static void load(Loaded&, const ReduceParams&, const T*, u32, u64) {}
  __device__ static Lanes<T> sum(Loaded&, const ReduceParams& p, const T* residual, u32, u64 element, u32 column) {
    Lanes<T> sum = {};
#pragma unroll
    for (u32 i = 0; i < Lanes<T>::COUNT; ++i) {
      if (column + i >= p.hidden) continue;
      sum.of[i] = add(sum_element<T>(p.parts, p.team.ranks, element + i), to_float(residual[element + i]));
    }
    return sum;
  }
  __device__ static Lanes<T> weight(const T* from, u32 column, u32 hidden) {
    Lanes<T> weight = {};
#pragma unroll
    for (u32 i = 0; i < Lanes<T>::COUNT; ++i) {
      if (column + i < hidden) weight.of[i] = to_float(from[column + i]);
    }
    return weight;
  }
  __device__ static void store(T* to, const Lanes<T>& lanes, u32 column, u32 hidden) {
#pragma unroll
    for (u32 i = 0; i < Lanes<T>::COUNT; ++i) {
      if (column + i < hidden) to[column + i] = from_float<T>(lanes.of[i]);
    }
  }
};

// A block's rows in one round: ROWS adjacent rows, each of SPANS spans.
template <class T, u32 SPANS, class Access>
struct NormRound {
  static constexpr u32 COUNT = Lanes<T>::COUNT;
  static constexpr u32 PER_SPAN = NORM_COLUMNS / COUNT;  // vectors of a thread
  static constexpr u32 PER_ROW = SPANS * PER_SPAN;
  static constexpr u32 ROWS = Access::AT_ONCE > PER_ROW ? Access::AT_ONCE / PER_ROW : 1;
  static constexpr u32 VECTORS = ROWS * PER_ROW;

  const NormParams& n;
  u32 first;
  u32 rows;  // of the rank
  Lanes<T> h[VECTORS];

  // Row and column of a thread's n-th vector, and whether the vector exists.
  __device__ u32 row(u32 vector) const { return first + vector / PER_ROW; }
  __device__ static u32 column(u32 vector) {
    return vector % PER_ROW / PER_SPAN * NORM_SPAN + threadIdx.x * NORM_COLUMNS + vector % PER_SPAN * COUNT;
  }
  __device__ bool present(u32 vector) const { return row(vector) < rows && column(vector) < n.reduce.hidden; }

  // Computes the sums, which are also the next layer's residual.
  __device__ void sum(const Meeting& meeting, u32 begin) {
    const ReduceParams& p = n.reduce;
    const T* residual = static_cast<const T*>(n.residual[blockIdx.y]);
    u32 tokens[ROWS];
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
      if (first + i < rows) tokens[i] = token_at(meeting, p.permutation[blockIdx.y], begin + first + i, p.tokens);
    }
    const auto element = [&](u32 vector) { return static_cast<u64>(tokens[vector / PER_ROW]) * p.hidden + column(vector); };
#pragma unroll
    for (u32 chunk = 0; chunk < VECTORS; chunk += Access::AT_ONCE) {
      // All loads are issued before the first sum waits for one.
      typename Access::Loaded loaded[Access::AT_ONCE];
#pragma unroll
      for (u32 i = chunk; i < chunk + Access::AT_ONCE && i < VECTORS; ++i) {
        if (present(i)) Access::load(loaded[i - chunk], p, residual, meeting.rank, element(i));
      }
#pragma unroll
      for (u32 i = chunk; i < chunk + Access::AT_ONCE && i < VECTORS; ++i) {
        h[i] = {};
        if (!present(i)) continue;
        h[i] = Access::sum(loaded[i - chunk], p, residual, meeting.rank, element(i), column(i));
        Access::store(row_at<T>(n.residual_out[blockIdx.y], row(i), p.hidden), h[i], column(i), p.hidden);
      }
    }
  }

  // Returns the sum of each row's squares to all threads.
  __device__ void squares(float (&of_rows)[ROWS], float (&shared)[NORM_ROWS][NORM_WARPS]) const {
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
      float columns[NORM_COLUMNS] = {};
#pragma unroll
      for (u32 vector = 0; vector < PER_ROW; ++vector) {
#pragma unroll
        for (u32 lane = 0; lane < COUNT; ++lane) {
          float& column = columns[vector % PER_SPAN * COUNT + lane];
          const float value = h[i * PER_ROW + vector].of[lane];
          column = add(column, multiply(value, value));
        }
      }
      const float warp = fold_lanes(fold(columns));
      if (lane_id() == 0) shared[i][warp_id()] = warp;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
      float warps[NORM_WARPS];
#pragma unroll
      for (u32 warp = 0; warp < NORM_WARPS; ++warp) warps[warp] = shared[i][warp];
      of_rows[i] = fold(warps);
    }
  }

  __device__ void write(const float (&squares)[ROWS]) const {
    const u32 hidden = n.reduce.hidden;
    float scales[ROWS];
#pragma unroll
    for (u32 i = 0; i < ROWS; ++i) {
      scales[i] = divide(1.0f, square_root(add(divide(squares[i], static_cast<float>(hidden)), n.epsilon)));
    }
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) {
      if (!present(i)) continue;
      Lanes<T> normed = Access::weight(static_cast<const T*>(n.weight[blockIdx.y]), column(i), hidden);
#pragma unroll
      for (u32 lane = 0; lane < COUNT; ++lane) normed.of[lane] = multiply(multiply(h[i].of[lane], scales[i / PER_ROW]), normed.of[lane]);
      Access::store(row_at<T>(n.reduce.out[blockIdx.y], row(i), hidden), normed, column(i), hidden);
    }
  }
};

template <class T, u32 SPANS, class Access>
__device__ inline void norm_rows(const NormParams& n, const Meeting& meeting, const Rows& rows, NormShared& shared) {
  using Round = NormRound<T, SPANS, Access>;
  u32 parity = 0;
  for (u32 first = blockIdx.x * Round::ROWS; first < rows.rows; first += gridDim.x * Round::ROWS) {
    Round round = {n, first, rows.rows, {}};
    round.sum(meeting, rows.begin);
    float squares[Round::ROWS];
    // Indexed by parity: the next round's barrier separates these reads from the writes of the round after it.
    round.squares(squares, shared.squares[parity]);
    parity ^= 1;
    round.write(squares);
  }
}

template <class T, class Access>
__device__ inline void norm_by_width(const NormParams& n, const Meeting& meeting, const Rows& rows, NormShared& shared) {
  if (n.reduce.hidden <= NORM_SPAN) {
    norm_rows<T, 1, Access>(n, meeting, rows, shared);
  } else if (n.reduce.hidden <= 2 * NORM_SPAN) {
    norm_rows<T, 2, Access>(n, meeting, rows, shared);
  } else {
    norm_rows<T, 4, Access>(n, meeting, rows, shared);
  }
}

template <class T>
__device__ inline void reduce_scatter_norm(const NormParams& n) {
  SEMMOE_SHARED(NormShared, shared);
  const ReduceParams& p = n.reduce;
  const Meeting meeting(p.team);
  meeting.enter(shape_digest(OP_REDUCE_NORM, p.tokens, p.hidden, sizeof(T)));
  const Rows rows(meeting, p.offsets[blockIdx.y], p.tokens, p.capacity);
  if (!whole_vectors<T>(p.hidden)) {
    norm_by_width<T, NormElements<T>>(n, meeting, rows, shared);
  } else if (p.team.ranks == 2) {
    norm_by_width<T, NormVectors<T, 2>>(n, meeting, rows, shared);
  } else if (p.team.ranks == 4) {
    norm_by_width<T, NormVectors<T, 4>>(n, meeting, rows, shared);
  } else if (p.team.ranks == 8) {
    norm_by_width<T, NormVectors<T, 8>>(n, meeting, rows, shared);
  } else {
    norm_by_width<T, NormVectors<T, 0>>(n, meeting, rows, shared);
  }
  meeting.leave();
}

SEMMOE_KERNEL(semmoe_srs_norm_f32, NormParams, NORM_THREADS) { reduce_scatter_norm<float>(p); }
SEMMOE_KERNEL(semmoe_srs_norm_f16, NormParams, NORM_THREADS) { reduce_scatter_norm<F16>(p); }
SEMMOE_KERNEL(semmoe_srs_norm_bf16, NormParams, NORM_THREADS) { reduce_scatter_norm<Bf16>(p); }
