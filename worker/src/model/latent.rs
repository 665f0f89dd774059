//! Multi-head latent attention (DeepSeek-V2, section 2.1) with absorbed projections: queries are projected into the
//! latent space, where all heads share one key (the latent vector and a rotated part) and one value (the latent
//! vector), and the outputs are projected back. The cache therefore stores `kv_rank + rope_dim` and `kv_rank` elements
//! per token, independent of the number of heads.

use super::attention::{Attended, AttentionScratch, AttentionStep, Heads};
use super::compute::{Linear, Matrix, rms_norm};
use super::config::LatentAttention;

/// Epsilon of the inner norms; no `config.json` specifies it.
const EPS: f32 = 1e-6;

/// One layer's latent attention.
pub(super) struct Latent<L = Linear> {
    /// A single key-value head whose group contains all query heads.
    pub(super) heads: Heads,
    pub(super) shape: LatentAttention,
    /// Projects to the queries (or their low-rank vector), then the latent vector, then the key's rotated part.
    pub(super) down: L,
    /// For low-rank queries: the norm of the low-rank vector, and its projection to queries.
    pub(super) query_up: Option<(Vec<f32>, L)>,
    /// `[kv_rank]`
    pub(super) kv_norm: Vec<f32>,
    /// Per head: projects the `nope_dim` unrotated elements of a query to `kv_rank`.
    pub(super) absorb: Vec<L>,
    /// Per head: projects the `kv_rank` elements of an output to `value_dim`.
    pub(super) expand: Vec<L>,
}

impl Latent {
    /// See [`super::attention::Attention::run`].
    pub(super) fn run(&self, step: &mut AttentionStep<'_, '_>, out: &mut Vec<f32>, scratch: &mut AttentionScratch) {
        let rows = step.rows;
        scratch.projected.resize(rows * self.down.outputs, 0.0);
        self.down.apply(step.normed, &mut scratch.projected);
        self.absorb_queries(rows, scratch);
        let (query_width, sum_width) = (self.heads.group * self.heads.key_width, self.heads.group * self.shape.kv_rank);
        let AttentionScratch { projected, queries, row, sums, threads, .. } = scratch;
        let threads = self.heads.threads(step, threads);
        sums.resize(rows * sum_width, 0.0);
        row.resize(self.heads.key_width, 0.0);
        for (item, range) in step.items.iter_mut().zip(step.offsets.windows(2)) {
            let start = item.kv.len();
            for (position, at) in (start..).zip(range[0]..range[1]) {
                let query = &mut queries[at * query_width..][..query_width];
                for head in query.chunks_exact_mut(self.heads.key_width) {
                    step.angles.rotate(position, &mut head[self.shape.kv_rank..]);
                }
                let latent = &projected[(at + 1) * self.down.outputs - self.heads.key_width..];
                let (key, rotated) = row.split_at_mut(self.shape.kv_rank);
                rms_norm(&latent[..key.len()], &self.kv_norm, EPS, key);
                rotated.copy_from_slice(&latent[key.len()..][..rotated.len()]);
                step.angles.rotate(position, rotated);
                item.kv.write(step.layer, 0, position, row, &row[..self.shape.kv_rank]);
            }
        }
        let over = Attended { layer: step.layer, items: step.items, offsets: step.offsets, queries };
        self.heads.attend(over, 0..rows, sums, threads);
        self.expand_sums(rows, sums, out);
    }

    /// Computes the queries `[rows, heads, kv_rank + rope_dim]`, without rotating them.
    fn absorb_queries(&self, rows: usize, scratch: &mut AttentionScratch) {
        let AttentionScratch { projected, between, queries, row, .. } = scratch;
        let (head_width, key_width) = (self.shape.query_width(), self.heads.key_width);
        let all_heads = self.heads.group * head_width;
        let stride = self.down.outputs;
        let (heads, stride) = match &self.query_up {
            None => (&projected[..], stride),
            Some((norm, up)) => {
                row.resize(rows * norm.len(), 0.0);
                for (projected, normed) in projected.chunks_exact(stride).zip(row.chunks_exact_mut(norm.len())) {
                    rms_norm(&projected[..norm.len()], norm, EPS, normed);
                }
                between.resize(rows * all_heads, 0.0);
                up.apply(&row[..rows * norm.len()], between);
                (&between[..], all_heads)
            }
        };
        let absorbed_width = self.heads.group * key_width;
        queries.resize(rows * absorbed_width, 0.0);
        if rows == 0 {
            return;
        }
        for (head, absorb) in self.absorb.iter().enumerate() {
            let x = Matrix { data: &heads[head * head_width..], stride };
            absorb.apply_rows(rows, x, &mut queries[head * key_width..], absorbed_width);
        }
        for (heads, queries) in heads.chunks(stride).zip(queries.chunks_exact_mut(absorbed_width)) {
            let heads = heads.chunks_exact(head_width).zip(queries.chunks_exact_mut(key_width));
            for (head, query) in heads {
                query[self.shape.kv_rank..].copy_from_slice(&head[self.shape.nope_dim..]);
            }
        }
    }

    /// Projects latent outputs `[rows, heads, kv_rank]` to head outputs `[rows, heads, value_dim]`.
    fn expand_sums(&self, rows: usize, sums: &[f32], out: &mut Vec<f32>) {
        let (rank, value) = (self.shape.kv_rank, self.shape.value_dim);
        out.resize(rows * self.heads.group * value, 0.0);
        if rows == 0 {
            return;
        }
        for (head, expand) in self.expand.iter().enumerate() {
            let x = Matrix { data: &sums[head * rank..], stride: self.heads.group * rank };
            expand.apply_rows(rows, x, &mut out[head * value..], self.heads.group * value);
        }
    }
}
