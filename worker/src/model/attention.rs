//! Causal grouped-query attention of one item over its cache.
//!
//! Scores and weighted values are products with the cache as the right operand; each query row has its own length, so the
//! result of a token does not depend on how its prompt was cut.

use std::ops::Range;

use super::ModelConfig;
use super::compute::{Columns, Matrix, NR, multiply, rms_norm, rotate, scale_to, softmax};
use super::kv::KvCache;
use super::rope::RotaryTable;

/// Query positions that share one pass over the cache.
const QUERY_BLOCK: usize = 16;

/// The widths of one layer's attention.
#[derive(Clone, Copy)]
pub(super) struct HeadShape {
    pub(super) kv_heads: usize,
    /// Query heads per key-value head.
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) eps: f32,
}

/// The norms of queries and keys, each `[head_dim]`.
pub(super) struct HeadNorms {
    pub(super) query: Vec<f32>,
    pub(super) key: Vec<f32>,
}

/// One layer's attention: all but the projections around it.
#[derive(Clone, Copy)]
pub(super) struct Attention<'a> {
    pub(super) shape: HeadShape,
    pub(super) norms: &'a HeadNorms,
    pub(super) angles: &'a RotaryTable,
    /// Which of the cache's layers.
    pub(super) layer: usize,
}

/// Buffers that are reused between calls.
#[derive(Default)]
pub(super) struct AttentionScratch {
    /// `[kv_heads, n, group, head_dim]`
    queries: Vec<f32>,
    key: Vec<f32>,
    /// `[block x group, keys]`
    scores: Vec<f32>,
    /// `[block x group, head_dim]`
    sums: Vec<f32>,
    /// `[block x group]`
    totals: Vec<f32>,
}

impl HeadShape {
    pub(super) fn new(config: &ModelConfig) -> Self {
        Self {
            kv_heads: config.kv_heads,
            group: config.heads / config.kv_heads,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
        }
    }

    /// Elements of all query heads of one token.
    pub(super) fn query_width(&self) -> usize {
        self.kv_heads * self.group * self.head_dim
    }

    /// Elements of queries, keys and values of one token.
    pub(super) fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.kv_heads * self.head_dim
    }
}

impl Attention<'_> {
    /// Attention of n tokens that follow the cached ones: writes their keys and values into the cache (which has room), and
    /// their sums to `out`.
    ///
    /// - `qkv` `[n, qkv_width]`: queries, keys, values as the projections gave them
    /// - `out` `[n, query_width]`
    pub(super) fn attend(&self, qkv: &[f32], cache: &mut KvCache, out: &mut [f32], scratch: &mut AttentionScratch) {
        let tokens = qkv.len() / self.shape.qkv_width();
        self.prepare(tokens, qkv, cache, scratch);
        for head in 0..self.shape.kv_heads {
            for first in (0..tokens).step_by(QUERY_BLOCK) {
                let end = tokens.min(first + QUERY_BLOCK);
                self.attend_block(head, first..end, tokens, cache, out, scratch);
            }
        }
    }

    /// Norms and rotates queries and keys; queries go to the scratch, keys and values to the cache.
    fn prepare(&self, tokens: usize, qkv: &[f32], cache: &mut KvCache, scratch: &mut AttentionScratch) {
        let HeadShape { kv_heads, group, head_dim, eps } = self.shape;
        scratch.queries.resize(tokens * self.shape.query_width(), 0.0);
        scratch.key.resize(head_dim, 0.0);
        let start = cache.len();
        for (token, row) in qkv.chunks_exact(self.shape.qkv_width()).enumerate() {
            let (cos, sin) = self.angles.at(start + token);
            let (queries, rest) = row.split_at(self.shape.query_width());
            let (keys, values) = rest.split_at(kv_heads * head_dim);
            for head in 0..kv_heads {
                let from = &queries[head * group * head_dim..][..group * head_dim];
                let to = &mut scratch.queries[(head * tokens + token) * group * head_dim..][..group * head_dim];
                rms_norm(from, &self.norms.query, eps, to);
                to.chunks_exact_mut(head_dim).for_each(|query| rotate(query, cos, sin));
                rms_norm(&keys[head * head_dim..][..head_dim], &self.norms.key, eps, &mut scratch.key);
                rotate(&mut scratch.key, cos, sin);
                let value = &values[head * head_dim..][..head_dim];
                cache.write(self.layer, head, start + token, &scratch.key, value);
            }
        }
    }

    /// Some positions of all query heads of one key-value head.
    fn attend_block(
        &self,
        head: usize,
        block: Range<usize>,
        tokens: usize,
        cache: &KvCache,
        out: &mut [f32],
        scratch: &mut AttentionScratch,
    ) {
        let HeadShape { group, head_dim, .. } = self.shape;
        let AttentionScratch { queries, scores, sums, totals, .. } = scratch;
        let rows = block.len() * group;
        // The last position of the block sees all of these keys.
        let keys = cache.len() + block.end;
        let width = keys.next_multiple_of(NR);
        let cached = cache.head(self.layer, head);
        scores.resize(rows * width, 0.0);
        sums.resize(rows * head_dim, 0.0);
        totals.clear();

        let queries = &queries[(head * tokens + block.start) * group * head_dim..][..rows * head_dim];
        let queries = Matrix { data: queries, stride: head_dim };
        multiply((rows, head_dim, width), queries, Columns::F32(&cached.keys), scores, width);
        let scale = 1.0 / (head_dim as f32).sqrt();
        for (row, scores) in scores.chunks_exact_mut(width).enumerate() {
            let visible = cache.len() + block.start + row / group + 1;
            totals.push(softmax(scores, visible, scale));
        }
        let values = Matrix { data: &cached.values, stride: cache.value_stride() };
        let scores = Matrix { data: scores, stride: width };
        multiply((rows, keys, head_dim), scores, Columns::Rows(values), sums, head_dim);

        let query_width = self.shape.query_width();
        for ((row, sum), total) in sums.chunks_exact(head_dim).enumerate().zip(totals) {
            let (token, query_head) = (block.start + row / group, head * group + row % group);
            scale_to(sum, 1.0 / *total, &mut out[token * query_width + query_head * head_dim..][..head_dim]);
        }
    }
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
