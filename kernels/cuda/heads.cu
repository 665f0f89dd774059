// Converts a projection's rows to heads: queries, keys and values are normed, clipped and rotated; keys and values are
// written to their pages.
//
// A warp processes one head of one row; a lane has pairs of elements that rotate against each other. For each layer and
// head a page has the keys `[dim, 64]`, so that neighbouring keys are adjacent, then the values `[64, dim]`.
#include "rows.cuh"

constexpr u32 HEAD_THREADS = 256;
constexpr u32 HEAD_WARPS = HEAD_THREADS / WARP;
constexpr u32 HEAD_PAIRS = 4;  // of a lane: heads of up to 256 elements
constexpr u32 PAGE_TOKENS = 64;

struct HeadRowsParams {
  const void* qkv;          // [n, Q + K + kv_heads x dim]
  const float* query_norm;  // [dim], or [Q] if `whole`; null: no norm
  const float* key_norm;    // [dim], or [K] if `whole`
  const float* cos;         // [angles, rotated / 2]
  const float* sin;         // the same
  const u32* positions;     // [n]
  const u32* page_of;       // [n]
  void* queries;            // [n, kv_heads, group, dim]
  void* pool;
  u64 page_elements;
  u64 layer_begins;  // the layer's first element in a page
  u32 rows;
  u32 pages;
  u32 query_elements;  // Q
  u32 key_elements;    // K
  u32 first_query;     // where the heads here begin in Q
  u32 first_key;       // and in K
  u32 kv_heads;
  u32 group;
  u32 dim;
  u32 rotated;  // elements of a head that rotate, its first ones
  u32 angles;   // positions that the tables have
  u32 neighbours;  // not 0: elements rotate against their neighbours, else halves against each other
  u32 whole;       // not 0: a norm spans all heads of the projection
  float epsilon;
  float clip;  // the largest magnitude
  u32 padding;
};

struct HeadShared {
  float squares[2][HEAD_WARPS];  // of queries, of keys
};

// The two elements of a pair: their positions in the head, and their values.
struct HeadPair {
  u32 at[2];
  float of[2];
};

template <class T>
struct HeadOfRow {
  const HeadRowsParams& p;
  u32 row;
  u32 head;  // queries, then keys, then values

  __device__ u32 queries() const { return p.kv_heads * p.group; }
  __device__ bool is_query() const { return head < queries(); }
  __device__ bool is_key() const { return !is_query() && head < queries() + p.kv_heads; }
  __device__ bool is_value() const { return !is_query() && !is_key(); }
  __device__ bool is_none() const { return head >= queries() + 2 * p.kv_heads; }
  __device__ u32 kv_head() const { return is_key() ? head - queries() : head - queries() - p.kv_heads; }

  __device__ const T* row_begins() const {
    return row_at<T>(p.qkv, row, p.query_elements + p.key_elements + p.kv_heads * p.dim);
  }
  // Returns the head's first element among the projection's queries, keys or values.
  __device__ u32 offset() const {
    if (is_query()) return p.first_query + head * p.dim;
    return (is_key() ? p.first_key : 0) + kv_head() * p.dim;
  }
  __device__ const T* source() const {
    if (is_query()) return row_begins() + offset();
    return row_begins() + p.query_elements + (is_key() ? 0 : p.key_elements) + offset();
  }
  __device__ const float* norm() const {
    const float* weight = is_query() ? p.query_norm : p.key_norm;
    return p.whole != 0 ? weight + offset() : weight;
  }

  __device__ u32 pairs() const { return p.dim / 2; }
  __device__ bool rotates(u32 pair) const { return !is_value() && pair < p.rotated / 2; }
  __device__ void load(HeadPair (&held)[HEAD_PAIRS]) const {
    const T* from = source();
#pragma unroll
    for (u32 j = 0; j < HEAD_PAIRS; ++j) {
      const u32 pair = lane_id() + j * WARP;
      const bool halves = p.neighbours == 0 && pair < p.rotated / 2;
      held[j].at[0] = halves ? pair : 2 * pair;
      held[j].at[1] = halves ? pair + p.rotated / 2 : 2 * pair + 1;
#pragma unroll
      for (u32 i = 0; i < 2; ++i) held[j].of[i] = pair < pairs() ? to_float(from[held[j].at[i]]) : 0.0f;
    }
  }

  __device__ static float squares_of(const HeadPair (&held)[HEAD_PAIRS]) {
    float squares = 0.0f;
#pragma unroll
    for (u32 j = 0; j < HEAD_PAIRS; ++j) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) squares = add(squares, multiply(held[j].of[i], held[j].of[i]));
    }
    return sum_lanes(squares);
  }
  __device__ float clipped(float v) const { return v > p.clip ? p.clip : v < -p.clip ? -p.clip : v; }

  // Norms by this factor (values are not normed), clips and rotates.
  __device__ void finish(HeadPair (&held)[HEAD_PAIRS], float scale, u32 position) const {
    const bool normed = p.query_norm != nullptr && !is_value();
#pragma unroll
    for (u32 j = 0; j < HEAD_PAIRS; ++j) {
      const u32 pair = lane_id() + j * WARP;
      if (pair >= pairs()) continue;
      float (&of)[2] = held[j].of;
#pragma unroll
      for (u32 i = 0; i < 2; ++i) {
        if (normed) of[i] = multiply(multiply(of[i], scale), norm()[held[j].at[i]]);
        of[i] = clipped(of[i]);
      }
      if (!rotates(pair)) continue;
      const u64 angle = static_cast<u64>(position) * (p.rotated / 2) + pair;
      const float cos = position < p.angles ? p.cos[angle] : not_a_number();
      const float sin = position < p.angles ? p.sin[angle] : not_a_number();
      const float first = of[0];
      of[0] = add(multiply(first, cos), -multiply(of[1], sin));
      of[1] = add(multiply(of[1], cos), multiply(first, sin));
    }
  }

  __device__ void store(const HeadPair (&held)[HEAD_PAIRS], u32 position) const {
    const u32 page = p.page_of[row];
    const bool lost = page >= p.pages;
    if (!is_query() && lost) return;
    T* to = static_cast<T*>(p.queries) + (static_cast<u64>(row) * queries() + head) * p.dim;
    u32 stride = 1;
    if (!is_query()) {
      const u32 token = position % PAGE_TOKENS;
      to = static_cast<T*>(p.pool) + page * p.page_elements + p.layer_begins + static_cast<u64>(kv_head()) * PAGE_TOKENS * 2 * p.dim;
      to += is_key() ? token : (PAGE_TOKENS + token) * p.dim;
      stride = is_key() ? PAGE_TOKENS : 1;
    }
#pragma unroll
    for (u32 j = 0; j < HEAD_PAIRS; ++j) {
      if (lane_id() + j * WARP >= pairs()) continue;
#pragma unroll
      for (u32 i = 0; i < 2; ++i) to[held[j].at[i] * stride] = from_float<T>(lost ? not_a_number() : held[j].of[i]);
    }
  }
};

// Returns the sums of squares of all queries and of all keys of a row to all threads.
template <class T>
__device__ inline void squares_of_row(const HeadOfRow<T>& of, HeadShared& shared, float (&sums)[2]) {
  const T* row = of.row_begins();
  const u32 begins[3] = {0, of.p.query_elements, of.p.query_elements + of.p.key_elements};
#pragma unroll
  for (u32 part = 0; part < 2; ++part) {
    float squares = 0.0f;
    for (u32 i = begins[part] + threadIdx.x; i < begins[part + 1]; i += HEAD_THREADS) {
      const float v = to_float(row[i]);
      squares = add(squares, multiply(v, v));
    }
    squares = sum_lanes(squares);
    if (lane_id() == 0) shared.squares[part][warp_id()] = squares;
  }
  __syncthreads();
#pragma unroll
  for (u32 part = 0; part < 2; ++part) {
    sums[part] = 0.0f;
    for (u32 warp = 0; warp < HEAD_WARPS; ++warp) sums[part] = add(sums[part], shared.squares[part][warp]);
  }
}

template <class T>
__device__ inline void head_rows(const HeadRowsParams& p) {
  SEMMOE_SHARED(HeadShared, shared);
  if (blockIdx.y >= p.rows) return;
  const HeadOfRow<T> of{p, blockIdx.y, blockIdx.x * HEAD_WARPS + warp_id()};
  float sums[2] = {0.0f, 0.0f};
  const bool whole = p.whole != 0 && p.query_norm != nullptr;
  if (whole) squares_of_row<T>(of, shared, sums);
  if (of.is_none()) return;
  const u32 position = p.positions[of.row];
  HeadPair held[HEAD_PAIRS];
  of.load(held);
  float scale = 1.0f;
  if (p.query_norm != nullptr && !of.is_value()) {
    const float squares = whole ? sums[of.is_query() ? 0 : 1] : of.squares_of(held);
    const u32 width = !whole ? p.dim : of.is_query() ? p.query_elements : p.key_elements;
    scale = 1.0f / sqrtf(add(squares / static_cast<float>(width), p.epsilon));
  }
  of.finish(held, scale, position);
  of.store(held, position);
}

SEMMOE_KERNEL(semmoe_head_rows_f32, HeadRowsParams, HEAD_THREADS) { head_rows<float>(p); }
SEMMOE_KERNEL(semmoe_head_rows_bf16, HeadRowsParams, HEAD_THREADS) { head_rows<Bf16>(p); }
