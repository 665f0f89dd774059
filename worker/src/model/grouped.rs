//! Grouped-query attention: one projection computes queries, keys and values; norms and clipping depend on the model
//! family.

use super::attention::{Attended, AttentionScratch, AttentionStep, Heads, ThreadScratch};
use super::compute::{Linear, clamp, rms_norm};
use super::kv::KvCache;
use super::rope::RotaryTable;
use super::step::StepItem;
use crate::threads::both;

/// One layer's grouped attention.
pub(super) struct Grouped<L = Linear> {
    pub(super) heads: Heads,
    pub(super) projected: Projected,
    /// Projects a token to its queries, keys and values, in this order.
    pub(super) qkv: L,
    pub(super) norms: Option<HeadNorms>,
    /// Queries, keys and values are clipped to this magnitude.
    pub(super) clip: Option<f32>,
}

/// Layout of one token's projection output. If attention is split over ranks and a norm spans all heads, the output
/// covers more than this rank's heads.
#[derive(Clone, Copy)]
pub(super) struct Projected {
    /// Number of query elements. The keys follow, then the values of this rank's heads only.
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Offset of this rank's first head within the queries; `first_key` is the offset within the keys.
    pub(super) first_query: usize,
    pub(super) first_key: usize,
}

/// Query and key norm weights. A weight as wide as one head applies to each head separately; otherwise it spans all
/// heads.
pub(super) struct HeadNorms {
    pub(super) query: Vec<f32>,
    pub(super) key: Vec<f32>,
    pub(super) eps: f32,
}

/// The projections of some items, and a buffer for their queries.
struct Projection<'a, 'i> {
    layer: usize,
    angles: &'a RotaryTable,
    items: &'a mut [StepItem<'i>],
    /// First row of each item, followed by the end of the last one.
    offsets: &'a [usize],
    /// `[rows, qkv_width]`
    qkv: &'a [f32],
    /// `[rows, query_width]`
    queries: &'a mut [f32],
}

impl Projection<'_, '_> {
    /// Splits the items into two non-empty sets, the first with about `share / all` of the rows.
    fn split(self, share: usize, all: usize) -> (Self, Self) {
        let first = self.offsets[0];
        let rows = self.offsets[self.items.len()] - first;
        let items = self.offsets.partition_point(|at| (at - first) * all < rows * share).clamp(1, self.items.len() - 1);
        let part = self.offsets[items] - first;
        let (items_before, items_after) = self.items.split_at_mut(items);
        let (qkv_before, qkv_after) = self.qkv.split_at(self.qkv.len() / rows * part);
        let (queries_before, queries_after) = self.queries.split_at_mut(self.queries.len() / rows * part);
        let (before, after) = (&self.offsets[..=items], &self.offsets[items..]);
        (
            Self { items: items_before, offsets: before, qkv: qkv_before, queries: queries_before, ..self },
            Self { items: items_after, offsets: after, qkv: qkv_after, queries: queries_after, ..self },
        )
    }
}

impl Grouped {
    /// Elements in one token's queries.
    fn query_width(&self) -> usize {
        self.heads.kv_heads * self.heads.group * self.heads.key_width
    }

    /// Elements in the projection output for one token.
    fn qkv_width(&self) -> usize {
        self.projected.queries + self.projected.keys + self.heads.kv_heads * self.heads.key_width
    }

    /// See [`super::attention::Attention::run`].
    pub(super) fn run(&self, step: &mut AttentionStep<'_, '_>, out: &mut Vec<f32>, scratch: &mut AttentionScratch) {
        let mut qkv = std::mem::take(&mut scratch.projected);
        qkv.resize(step.rows * self.qkv_width(), 0.0);
        out.resize(step.rows * self.query_width(), 0.0);
        self.qkv.apply(step.normed, &mut qkv);
        self.attend(step, &qkv, out, scratch);
        scratch.projected = qkv;
    }

    /// Normalises and rotates queries and keys, writes keys and values into the caches and computes attention for all
    /// items.
    ///
    /// - `qkv` `[rows, qkv_width]`: the output of the projection
    /// - `out` `[rows, query_width]`
    fn attend(&self, step: &mut AttentionStep<'_, '_>, qkv: &[f32], out: &mut [f32], scratch: &mut AttentionScratch) {
        let AttentionScratch { queries, threads, .. } = scratch;
        let threads = self.heads.threads(step, threads);
        queries.resize(step.rows * self.query_width(), 0.0);
        let AttentionStep { layer, angles, rows, offsets, .. } = *step;
        self.prepare(Projection { layer, angles, items: step.items, offsets, qkv, queries }, threads);
        let over = Attended { layer, items: step.items, offsets, queries };
        self.heads.attend(over, 0..rows, out, threads);
    }

    /// Writes queries in the layout of [`Attended`], and keys and values into the caches. Items are divided among one
    /// thread per buffer.
    fn prepare(&self, of: Projection<'_, '_>, threads: &mut [ThreadScratch]) {
        if threads.len() > 1 && of.items.len() > 1 {
            let all = threads.len();
            let (first, second) = threads.split_at_mut(all / 2);
            let (before, after) = of.split(first.len(), all);
            return both(|| self.prepare(before, first), || self.prepare(after, second));
        }
        let Projection { layer, angles, items, offsets, mut qkv, mut queries } = of;
        for (item, range) in items.iter_mut().zip(offsets.windows(2)) {
            let tokens = range[1] - range[0];
            let of_item = qkv.split_off(..tokens * self.qkv_width()).unwrap_or_default();
            let queries = queries.split_off_mut(..tokens * self.query_width()).unwrap_or_default();
            self.prepare_item(layer, angles, of_item, item.kv, queries, &mut threads[0].row);
        }
    }

    /// Prepares one item of n tokens.
    ///
    /// - `qkv` `[n, qkv_width]`
    /// - `rotated` `[kv_heads, n, group, key_width]`: receives the normalised and rotated queries
    fn prepare_item(
        &self,
        layer: usize,
        angles: &RotaryTable,
        qkv: &[f32],
        cache: &mut KvCache,
        rotated: &mut [f32],
        row: &mut Vec<f32>,
    ) {
        let Heads { kv_heads, group, key_width: dim, .. } = self.heads;
        let tokens = qkv.len() / self.qkv_width();
        row.resize(self.qkv_width(), 0.0);
        for (token, projected) in qkv.chunks_exact(self.qkv_width()).enumerate() {
            let position = cache.len() + token;
            self.normed(projected, row);
            let (queries, rest) = row.split_at_mut(self.projected.queries);
            let (keys, values) = rest.split_at_mut(self.projected.keys);
            let queries = &mut queries[self.projected.first_query..][..kv_heads * group * dim];
            let keys = &mut keys[self.projected.first_key..][..kv_heads * dim];
            queries.chunks_exact_mut(dim).for_each(|query| angles.rotate(position, query));
            keys.chunks_exact_mut(dim).for_each(|key| angles.rotate(position, key));
            for head in 0..kv_heads {
                rotated[(head * tokens + token) * group * dim..][..group * dim]
                    .copy_from_slice(&queries[head * group * dim..][..group * dim]);
                cache.write(layer, head, position, &keys[head * dim..][..dim], &values[head * dim..][..dim]);
            }
        }
    }

    /// Normalises and clips one token's queries, keys and values.
    fn normed(&self, projected: &[f32], out: &mut [f32]) {
        match &self.norms {
            None => out.copy_from_slice(projected),
            Some(norms) => {
                let keys_at = self.projected.queries;
                let values_at = keys_at + self.projected.keys;
                rms_norm(&projected[..keys_at], &norms.query, norms.eps, &mut out[..keys_at]);
                rms_norm(&projected[keys_at..values_at], &norms.key, norms.eps, &mut out[keys_at..values_at]);
                out[values_at..].copy_from_slice(&projected[values_at..]);
            }
        }
        if let Some(most) = self.clip {
            clamp(out, most);
        }
    }
}

#[cfg(test)]
#[path = "grouped_tests.rs"]
mod tests;
