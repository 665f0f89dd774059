// Looks up rows of a table by token, and adds rows to the residual: one thread per 16 bytes of a row.
#include "rows.cuh"

struct EmbedParams {
  const void* table;  // [V, H]
  const u32* tokens;  // [n]
  void* out;          // [n, H]
  u32 rows;
  u32 hidden;
  u32 vocab;
  u32 padding;
};

template <class Access>
__device__ inline void embed(const EmbedParams& p) {
  typedef typename Access::Element T;
  const u32 row = blockIdx.y;
  const u32 unit = unit_in_row();
  if (row >= p.rows || unit >= p.hidden / Access::COUNT) return;
  const u32 token = p.tokens[row];
  const auto values = token < p.vocab ? Access::load(row_at<T>(p.table, token, p.hidden), unit)
                                           : all_of<Access>(not_a_number());
  Access::store(row_at<T>(p.out, row, p.hidden), unit, values);
}

struct AddRowsParams {
  void* residual;     // [n, H]
  const void* added;  // [n, H]
  const float* gate;  // [n]: logits; null: rows are added as they are
  u32 rows;
  u32 hidden;
};

template <class Access>
__device__ inline void add_rows(const AddRowsParams& p) {
  typedef typename Access::Element T;
  const u32 row = blockIdx.y;
  const u32 unit = unit_in_row();
  if (row >= p.rows || unit >= p.hidden / Access::COUNT) return;
  T* residual = row_at<T>(p.residual, row, p.hidden);
  auto sums = Access::load(residual, unit);
  const auto more = Access::load(row_at<T>(p.added, row, p.hidden), unit);
  const float factor = p.gate == nullptr ? 1.0f : sigmoid(p.gate[row]);
#pragma unroll
  for (u32 i = 0; i < Access::COUNT; ++i) sums.of[i] = add(sums.of[i], multiply(factor, more.of[i]));
  Access::store(residual, unit, sums);
}

SEMMOE_KERNEL(semmoe_embed_f32, EmbedParams, ROW_THREADS) {
  whole_vectors<float>(p.hidden) ? embed<ByVector<float>>(p) : embed<ByElement<float>>(p);
}
SEMMOE_KERNEL(semmoe_embed_bf16, EmbedParams, ROW_THREADS) {
  whole_vectors<Bf16>(p.hidden) ? embed<ByVector<Bf16>>(p) : embed<ByElement<Bf16>>(p);
}
SEMMOE_KERNEL(semmoe_add_rows_f32, AddRowsParams, ROW_THREADS) {
  whole_vectors<float>(p.hidden) ? add_rows<ByVector<float>>(p) : add_rows<ByElement<float>>(p);
}
SEMMOE_KERNEL(semmoe_add_rows_bf16, AddRowsParams, ROW_THREADS) {
  whole_vectors<Bf16>(p.hidden) ? add_rows<ByVector<Bf16>>(p) : add_rows<ByElement<Bf16>>(p);
}
