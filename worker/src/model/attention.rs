//! Causal attention of one item over its cache, whatever made the queries, keys and values.
//!
//! Scores and weighted values are products with the cache as the right operand; each query row has its own length, so the
//! result of a token does not depend on how its prompt was cut.

use std::ops::Range;

use super::compute::{Columns, Linear, Matrix, NR, multiply, multiply_on_top, scale_to, softmax};
use super::grouped::Grouped;
use super::kv::{KvCache, PAGE_TOKENS, Page};
use super::latent::Latent;
use super::rope::RotaryTable;
use super::step::StepItem;

/// Query positions that share one pass over the cache.
const QUERY_BLOCK: usize = 16;

/// A layer's attention, without its output projection.
pub(super) enum Attention {
    Grouped(Grouped),
    Latent(Latent),
}

/// What one layer attends over: the rows of all items, normed, one item after the other.
pub(super) struct AttentionStep<'a, 'i> {
    /// Which of the cache's layers.
    pub(super) layer: usize,
    pub(super) angles: &'a RotaryTable,
    /// `[rows, H]`
    pub(super) normed: &'a [f32],
    pub(super) rows: usize,
    pub(super) items: &'a mut [StepItem<'i>],
    /// First row of each item, and one past the last.
    pub(super) offsets: &'a [usize],
}

/// Buffers that are reused between calls; each kind of attention uses some.
#[derive(Default)]
pub(super) struct AttentionScratch {
    /// `[rows, any]`: what the first projection gave.
    pub(super) projected: Vec<f32>,
    /// `[rows, any]`: what lies between projections.
    pub(super) between: Vec<f32>,
    /// Queries as [`Heads::attend`] takes them.
    pub(super) queries: Vec<f32>,
    /// One token's row, or key.
    pub(super) row: Vec<f32>,
    /// `[rows, any]`: sums that are not yet the heads' values.
    pub(super) sums: Vec<f32>,
    pub(super) scores: ScoreScratch,
}

/// Buffers of [`Heads::attend`].
#[derive(Default)]
pub(super) struct ScoreScratch {
    /// `[block x group, keys]`
    scores: Vec<f32>,
    /// `[block x group, value_width]`
    sums: Vec<f32>,
    /// `[block x group]`
    totals: Vec<f32>,
}

/// The widths of one layer's attention.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) kv_heads: usize,
    /// Query heads per key-value head.
    pub(super) group: usize,
    pub(super) key_width: usize,
    pub(super) value_width: usize,
    /// Factor of the scores.
    pub(super) scale: f32,
}

impl Attention {
    /// Writes keys and values into the caches (which have room), and the heads' sums `[rows, heads x value width]` to `out`.
    pub(super) fn run(&self, step: &mut AttentionStep<'_, '_>, out: &mut Vec<f32>, scratch: &mut AttentionScratch) {
        match self {
            Self::Grouped(grouped) => grouped.run(step, out, scratch),
            Self::Latent(latent) => latent.run(step, out, scratch),
        }
    }

    /// All packed weights, in the order in which they are used.
    pub(super) fn linears(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Grouped(grouped) => vec![&mut grouped.qkv],
            Self::Latent(latent) => {
                let up = latent.query_up.as_mut().map(|(_, up)| up);
                std::iter::once(&mut latent.down)
                    .chain(up)
                    .chain(&mut latent.absorb)
                    .chain(&mut latent.expand)
                    .collect()
            }
        }
    }
}

impl Heads {
    /// Attention of n tokens that follow the cached ones, whose own keys and values are already written.
    ///
    /// - `queries` `[kv_heads, n, group, key_width]`
    /// - `out` `[n, kv_heads, group, value_width]`
    pub(super) fn attend(
        &self,
        layer: usize,
        queries: &[f32],
        cache: &KvCache,
        out: &mut [f32],
        scratch: &mut ScoreScratch,
    ) {
        let per_head = queries.len() / self.kv_heads;
        let tokens = per_head / (self.group * self.key_width);
        for (head, queries) in queries.chunks_exact(per_head.max(1)).enumerate() {
            for first in (0..tokens).step_by(QUERY_BLOCK) {
                let end = tokens.min(first + QUERY_BLOCK);
                self.attend_block((layer, head), first..end, queries, cache, out, scratch);
            }
        }
    }

    /// Some positions of all query heads of one key-value head.
    fn attend_block<'c>(
        &self,
        (layer, head): (usize, usize),
        block: Range<usize>,
        queries: &[f32],
        cache: &'c KvCache,
        out: &mut [f32],
        scratch: &mut ScoreScratch,
    ) {
        let Self { kv_heads, group, key_width, value_width, scale } = *self;
        let ScoreScratch { scores, sums, totals } = scratch;
        let rows = block.len() * group;
        // The last position of the block sees all of these keys.
        let keys = cache.len() + block.end;
        let width = keys.next_multiple_of(NR);
        let shape = cache.shape();
        scores.resize(rows * width, 0.0);
        sums.resize(rows * value_width, 0.0);
        totals.clear();

        let queries = &queries[block.start * group * key_width..][..rows * key_width];
        let queries = Matrix { data: queries, stride: key_width };
        // Each product names what is read next, as pages lie anywhere: keys, then values, then the next head's keys.
        let keys_of = |page: &'c Page, head| Matrix { data: page.keys(shape, layer, head), stride: PAGE_TOKENS };
        let values_of = |page: &'c Page| page.values(shape, layer, head);
        let first_page = cache.pages(keys).next().map(|(_, _, page)| page);
        let mut pages = cache.pages(keys).peekable();
        while let Some((first, held, page)) = pages.next() {
            let next = pages.peek().map(|(_, _, page)| keys_of(page, head).data).or(first_page.map(values_of));
            let columns = Columns::Rows { matrix: keys_of(page, head), next };
            multiply((rows, key_width, held.next_multiple_of(NR)), queries, columns, &mut scores[first..], width);
        }
        for (row, scores) in scores.chunks_exact_mut(width).enumerate() {
            let visible = cache.len() + block.start + row / group + 1;
            totals.push(softmax(scores, visible, scale));
        }
        let next_head = first_page.filter(|_| head + 1 < kv_heads).map(|page| keys_of(page, head + 1).data);
        let mut pages = cache.pages(keys).peekable();
        while let Some((first, held, page)) = pages.next() {
            let matrix = Matrix { data: values_of(page), stride: cache.value_stride() };
            let next = pages.peek().map(|(_, _, page)| values_of(page)).or(next_head);
            let scores = Matrix { data: &scores[first..], stride: width };
            let product = if first == 0 { multiply } else { multiply_on_top };
            product((rows, held, value_width), scores, Columns::Rows { matrix, next }, sums, value_width);
        }

        let out_width = kv_heads * group * value_width;
        for ((row, sum), total) in sums.chunks_exact(value_width).enumerate().zip(totals) {
            let (token, query_head) = (block.start + row / group, head * group + row % group);
            scale_to(sum, 1.0 / *total, &mut out[token * out_width + query_head * value_width..][..value_width]);
        }
    }
}
