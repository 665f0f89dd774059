// Code shared by all attention over pages: parameters, a block's rows, and the merging of partial results.
//
// Keys are processed in splits of 256, which is four pages; a warp scores one page. A split's partial result is its
// largest score, the sum of its weights and the weighted values; partial results are merged in ascending order. A row's
// result therefore depends neither on whether a block processes all splits or only one, nor on the other rows. Scores
// are base-2 exponents: exp(x) = exp2(x log2 e).
#pragma once
#include "rows.cuh"

constexpr u32 SPLIT_PAGES = 4;
constexpr u32 ATTEND_PAGE = 64;  // tokens
constexpr u32 SPLIT_KEYS = SPLIT_PAGES * ATTEND_PAGE;
constexpr u32 ATTEND_THREADS = SPLIT_PAGES * WARP;
constexpr u32 QUERY_TILE = 8;
constexpr u32 VALUE_COLUMNS = 64;  // of one product
constexpr u32 NO_PAGE = 0xffffffffu;
constexpr u32 MERGE_THREADS = 128;

struct AttendParams {
  const void* queries;     // [n, kv_heads, group, dim]
  const void* pool;        // pages; see heads.cu
  const u32* positions;    // [n]: the last key that a row sees
  const u32* sequence_of;  // [n]
  const u32* page_table;   // [sequences, table_width]
  float* values;           // [n, slots, kv_heads, group, dim]: sums of weighted values
  float* totals;           // [n, slots, kv_heads, group, 2]: largest scores, sums of weights
  void* out;               // [n, kv_heads, group, dim]
  u64 page_elements;
  u64 layer_begins;  // the layer's first element in a page
  u32 rows;
  u32 kv_heads;
  u32 group;
  u32 dim;
  u32 pages;
  u32 sequences;
  u32 table_width;
  u32 slots;           // 1: a block takes all splits; else each its own
  u32 rows_of_block;   // at most
  u32 longest;         // no position is above it
  float scale;         // of scores, times log2 e
  u32 padding;
};

__device__ inline float exp2_of(float v) {
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
#else
  return exp2f(v);
#endif
}
// NaN counts as the larger.
__device__ inline float larger_score(float a, float b) { return a > b || a != a ? a : b; }
__device__ inline bool is_nothing(float largest) { return largest == minus_infinity(); }

// Merges two partial results: the factor of each.
struct Fold {
  float largest;
  float of[2];

  __device__ Fold(float before, float now) : largest(larger_score(before, now)), of{exp2_of(add(before, -largest)), exp2_of(add(now, -largest))} {}
  __device__ float operator()(float before, float now) const { return fused(now, of[1], multiply(before, of[0])); }
};

// Consecutive rows of one sequence, some of whose queries a block processes at once.
struct QueryRun {
  u32 first_row;
  u32 sequence;
  u32 kv_head;
  u32 first;    // of the run's queries: row by row, `group` each
  u32 queries;  // at once
  u32 last;     // the last key that any of them sees

  __device__ u32 row(const AttendParams& p, u32 query) const { return first_row + (first + query) / p.group; }
  __device__ u32 head(const AttendParams& p, u32 query) const { return kv_head * p.group + (first + query) % p.group; }
  // Returns a query head's offset among those of all rows.
  __device__ u64 query_at(const AttendParams& p, u32 query) const {
    return static_cast<u64>(row(p, query)) * (p.kv_heads * p.group) + head(p, query);
  }
  __device__ u64 slot_at(const AttendParams& p, u32 query, u32 slot) const {
    return (static_cast<u64>(row(p, query)) * p.slots + slot) * (p.kv_heads * p.group) + head(p, query);
  }
};

__device__ inline u32 position_of(const AttendParams& p, u32 row) { return p.positions[row] < p.longest ? p.positions[row] : p.longest; }

// One page of a run, as read by a warp.
struct RunPage {
  u32 begins;  // its first key
  u32 held;    // keys that a query of the run may see
  u32 page;    // NO_PAGE: the table has none

  __device__ RunPage(const AttendParams& p, const QueryRun& run, u32 index) : begins(index * ATTEND_PAGE), held(0), page(NO_PAGE) {
    if (begins > run.last) return;
    const u32 keys = run.last + 1 - begins;
    held = keys < ATTEND_PAGE ? keys : ATTEND_PAGE;
    if (run.sequence >= p.sequences || index >= p.table_width) return;
    const u32 found = p.page_table[static_cast<u64>(run.sequence) * p.table_width + index];
    if (found < p.pages) page = found;
  }
  __device__ bool is_lost() const { return held != 0 && page == NO_PAGE; }
  template <class T>
  __device__ const T* keys(const AttendParams& p, u32 kv_head) const {
    return static_cast<const T*>(p.pool) + page * p.page_elements + p.layer_begins + static_cast<u64>(kv_head) * ATTEND_PAGE * 2 * p.dim;
  }
  template <class T>
  __device__ const T* values(const AttendParams& p, u32 kv_head) const {
    return keys<T>(p, kv_head) + ATTEND_PAGE * p.dim;
  }
};

template <u32 TILES>
struct alignas(16) AttendShared {
  static constexpr u32 QUERIES = TILES * QUERY_TILE;
  // Weights of 64 keys for each page and query, four per vector; two extra vectors avoid bank conflicts.
  Vec weights[SPLIT_PAGES][QUERIES][ATTEND_PAGE / 4 + 2];
  // Weighted values of some columns for each page and query; eight extra numbers avoid bank conflicts.
  float values[SPLIT_PAGES][QUERY_TILE][VALUE_COLUMNS + 8];
  float largest[SPLIT_PAGES][QUERIES];
  float totals[SPLIT_PAGES][QUERIES];
  // Largest scores of all splits so far.
  float all_largest[QUERIES];
  float all_totals[QUERIES];
};

// The factors of a split's pages for one query.
template <u32 TILES>
struct SplitPart {
  float largest;
  float total;
  float of[SPLIT_PAGES];

  __device__ SplitPart(const AttendShared<TILES>& shared, u32 query) : largest(minus_infinity()), total(0.0f) {
#pragma unroll
    for (u32 page = 0; page < SPLIT_PAGES; ++page) largest = larger_score(largest, shared.largest[page][query]);
#pragma unroll
    for (u32 page = 0; page < SPLIT_PAGES; ++page) {
      const float of_page = shared.largest[page][query];
      of[page] = is_nothing(of_page) ? 0.0f : exp2_of(add(of_page, -largest));
      if (!is_nothing(of_page)) total = fused(shared.totals[page][query], of[page], total);
    }
  }
};

// One split of a run, and the destination of its partial results.
template <u32 TILES>
struct SplitOfRun {
  const AttendParams& p;
  AttendShared<TILES>& shared;
  QueryRun run;
  u32 split;

  __device__ bool folds() const { return p.slots == 1 && split != 0; }
  __device__ u32 slot() const { return p.slots == 1 ? 0 : split; }

  // Merges a weighted value of the split with those of earlier splits. The same thread handles the same value in each
  // split.
  __device__ void settle(u32 query, u32 column, float value, const SplitPart<TILES>& part) const {
    if (is_nothing(part.largest)) return;
    float* to = p.values + run.slot_at(p, query, slot()) * p.dim + column;
    *to = folds() ? Fold(shared.all_largest[query], part.largest)(*to, value) : value;
  }

  // Writes the largest score and the sum of weights, after all values of the split.
  __device__ void end() const {
    const u32 query = threadIdx.x;
    const bool counts = query < run.queries;
    float largest = minus_infinity(), total = 0.0f;
    if (counts) {
      const SplitPart<TILES> part(shared, query);
      largest = part.largest;
      total = part.total;
      if (folds()) {
        const Fold fold(shared.all_largest[query], part.largest);
        largest = fold.largest;
        total = fold(shared.all_totals[query], part.total);
      }
      float* to = p.totals + run.slot_at(p, query, slot()) * 2;
      to[0] = largest;
      to[1] = total;
    }
    // The split's shared data is overwritten only after all threads have read it.
    __syncthreads();
    if (counts) {
      shared.all_largest[query] = largest;
      shared.all_totals[query] = total;
    }
  }
};

// A block's rows: adjacent rows, later ones first because they have more keys; one head; all splits or one.
struct BlockOfRows {
  u32 kv_head;
  u32 first;
  u32 end;
  u32 split;

  __device__ explicit BlockOfRows(const AttendParams& p) {
    const u32 tiles = (p.rows + p.rows_of_block - 1) / p.rows_of_block;
    kv_head = blockIdx.x % p.kv_heads;
    first = (tiles - 1 - blockIdx.x / p.kv_heads) * p.rows_of_block;
    end = first + p.rows_of_block < p.rows ? first + p.rows_of_block : p.rows;
    split = blockIdx.y;
  }
};

template <class Products, u32 TILES>
__device__ inline void attend_run(const AttendParams& p, AttendShared<TILES>& shared, const QueryRun& run, u32 only) {
  const u32 splits = run.last / SPLIT_KEYS + 1;
  for (u32 split = p.slots == 1 ? 0 : only; split < splits; ++split) {
    Products::run(SplitOfRun<TILES>{p, shared, run, split});
    if (p.slots != 1) return;
  }
}

template <class Products, u32 TILES>
__device__ inline void attend(const AttendParams& p) {
  SEMMOE_SHARED(AttendShared<TILES>, shared);
  if (p.rows == 0) return;
  const BlockOfRows block(p);
  for (u32 first = block.first; first < block.end;) {
    QueryRun run{first, p.sequence_of[first], block.kv_head, 0, 0, position_of(p, first)};
    u32 end = first + 1;
    for (; end < block.end && p.sequence_of[end] == run.sequence; ++end) {
      const u32 position = position_of(p, end);
      run.last = position > run.last ? position : run.last;
    }
    const u32 queries = (end - first) * p.group;
    for (; run.first < queries; run.first += AttendShared<TILES>::QUERIES) {
      const u32 left = queries - run.first;
      run.queries = left < AttendShared<TILES>::QUERIES ? left : AttendShared<TILES>::QUERIES;
      attend_run<Products, TILES>(p, shared, run, block.split);
    }
    first = end;
  }
}
