//! Grouped-query attention: one projection gives queries, keys and values; norms and a clip where the family has them.

use super::attention::{AttentionScratch, AttentionStep, Heads};
use super::compute::{Linear, clamp, rms_norm};
use super::kv::KvCache;
use super::rope::RotaryTable;

/// One layer's grouped attention.
pub(super) struct Grouped {
    pub(super) heads: Heads,
    pub(super) projected: Projected,
    /// Queries, keys and values of one token, one after the other.
    pub(super) qkv: Linear,
    pub(super) norms: Option<HeadNorms>,
    /// The largest magnitude of queries, keys and values.
    pub(super) clip: Option<f32>,
}

/// What the projection gives of one token. It is more than the heads here need where a norm is over all heads and attention
/// is split over ranks.
#[derive(Clone, Copy)]
pub(super) struct Projected {
    /// Elements of queries, then of keys; values are those of the heads here.
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Where the heads here begin among them.
    pub(super) first_query: usize,
    pub(super) first_key: usize,
}

/// The norms of queries and keys: as wide as one head, each of which is then normed by itself, or as all of them together.
pub(super) struct HeadNorms {
    pub(super) query: Vec<f32>,
    pub(super) key: Vec<f32>,
    pub(super) eps: f32,
}

impl Grouped {
    /// Elements of all queries of one token.
    fn query_width(&self) -> usize {
        self.heads.kv_heads * self.heads.group * self.heads.key_width
    }

    /// Elements that the projection gives of one token.
    fn qkv_width(&self) -> usize {
        self.projected.queries + self.projected.keys + self.heads.kv_heads * self.heads.key_width
    }

    /// See [`super::attention::Attention::run`].
    pub(super) fn run(&self, step: &mut AttentionStep<'_, '_>, out: &mut Vec<f32>, scratch: &mut AttentionScratch) {
        let (width, out_width) = (self.qkv_width(), self.query_width());
        let mut qkv = std::mem::take(&mut scratch.projected);
        qkv.resize(step.rows * width, 0.0);
        out.resize(step.rows * out_width, 0.0);
        self.qkv.apply(step.normed, &mut qkv);
        for (item, range) in step.items.iter_mut().zip(step.offsets.windows(2)) {
            let (from, to) = (range[0], range[1]);
            let sums = &mut out[from * out_width..to * out_width];
            self.attend((step.layer, step.angles), &qkv[from * width..to * width], item.kv, sums, scratch);
        }
        scratch.projected = qkv;
    }

    /// Attention of one item's tokens: norms and rotates queries and keys, writes keys and values into the cache.
    ///
    /// - `qkv` `[n, qkv_width]`, as the projections gave them
    /// - `out` `[n, query_width]`
    fn attend(
        &self,
        (layer, angles): (usize, &RotaryTable),
        qkv: &[f32],
        cache: &mut KvCache,
        out: &mut [f32],
        scratch: &mut AttentionScratch,
    ) {
        let Heads { kv_heads, group, key_width: dim, .. } = self.heads;
        let AttentionScratch { queries: turned, row, scores, .. } = scratch;
        let tokens = qkv.len() / self.qkv_width();
        turned.resize(tokens * self.query_width(), 0.0);
        row.resize(self.qkv_width(), 0.0);
        for (token, projected) in qkv.chunks_exact(self.qkv_width()).enumerate() {
            let position = cache.len() + token;
            self.normed(projected, row);
            let (queries, rest) = row.split_at_mut(self.projected.queries);
            let (keys, values) = rest.split_at_mut(self.projected.keys);
            let queries = &mut queries[self.projected.first_query..][..kv_heads * group * dim];
            let keys = &mut keys[self.projected.first_key..][..kv_heads * dim];
            queries.chunks_exact_mut(dim).for_each(|query| angles.turn(position, query));
            keys.chunks_exact_mut(dim).for_each(|key| angles.turn(position, key));
            for head in 0..kv_heads {
                turned[(head * tokens + token) * group * dim..][..group * dim]
                    .copy_from_slice(&queries[head * group * dim..][..group * dim]);
                cache.write(layer, head, position, &keys[head * dim..][..dim], &values[head * dim..][..dim]);
            }
        }
        self.heads.attend(layer, turned, cache, out, scores);
    }

    /// One token's queries, keys and values, normed and clipped.
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
