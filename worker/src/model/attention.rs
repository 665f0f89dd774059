//! Causal attention over an item's cache, independent of how queries, keys and values were computed.
//!
//! Scores and weighted values are matrix products with the cache as the right operand. Each query row attends to its
//! own number of keys, so a token's result does not depend on how its prompt was chunked.

use std::ops::Range;

use super::compute::{Begin, Columns, Linear, Matrix, NR, Sizes, multiply, multiply_from, scale_to, softmax};
use super::grouped::Grouped;
use super::kv::{KvCache, PAGE_TOKENS, Page};
use super::latent::Latent;
use super::rope::RotaryTable;
use super::step::StepItem;
use crate::threads::{both, threads_for};

/// Query positions that share one pass over the cache.
const QUERY_BLOCK: usize = 16;

/// A layer's attention, without its output projection.
pub(super) enum Attention<L = Linear> {
    Grouped(Grouped<L>),
    Latent(Latent<L>),
}

/// Input to one layer's attention: the normalised rows of all items, concatenated.
pub(super) struct AttentionStep<'a, 'i> {
    /// Layer index in the cache.
    pub(super) layer: usize,
    pub(super) angles: &'a RotaryTable,
    /// `[rows, H]`
    pub(super) normed: &'a [f32],
    pub(super) rows: usize,
    pub(super) items: &'a mut [StepItem<'i>],
    /// First row of each item, followed by the total number of rows.
    pub(super) offsets: &'a [usize],
}

/// Scratch buffers reused between calls. Each attention kind uses only some of them.
#[derive(Default)]
pub(super) struct AttentionScratch {
    /// `[rows, any]`: the output of the first projection.
    pub(super) projected: Vec<f32>,
    /// `[rows, any]`: intermediate values between two projections.
    pub(super) between: Vec<f32>,
    /// Queries in the layout of [`Attended`].
    pub(super) queries: Vec<f32>,
    /// One token's key, or the normalised low-rank query vectors.
    pub(super) row: Vec<f32>,
    /// `[rows, any]`: attention outputs in latent space, before their projection to head values.
    pub(super) sums: Vec<f32>,
    /// One set of buffers per thread.
    pub(super) threads: Vec<ThreadScratch>,
}

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct ThreadScratch {
    /// One token's queries, keys and values.
    pub(super) row: Vec<f32>,
    /// `[block x group, keys]`
    scores: Vec<f32>,
    /// `[block x group, value_width]`
    sums: Vec<f32>,
    /// `[block x group]`
    totals: Vec<f32>,
}

/// A step's queries and the caches they attend over. The caches already contain the keys and values of the step's rows.
#[derive(Clone, Copy)]
pub(super) struct Attended<'a, 'i> {
    pub(super) layer: usize,
    pub(super) items: &'a [StepItem<'i>],
    /// First row of each item, followed by the total number of rows.
    pub(super) offsets: &'a [usize],
    /// Per item: `[kv_heads, n, group, key_width]`.
    pub(super) queries: &'a [f32],
}

/// One item's queries in one layer, and the cache they attend over.
#[derive(Clone, Copy)]
struct CachedItem<'a> {
    layer: usize,
    cache: &'a KvCache,
    /// `[kv_heads, n, group, key_width]`
    queries: &'a [f32],
}

/// Attention dimensions of one layer.
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
    /// Writes keys and values into the caches, which must have space reserved, and the heads' outputs, `[rows, heads x
    /// value width]`, to `out`.
    pub(super) fn run(&self, step: &mut AttentionStep<'_, '_>, out: &mut Vec<f32>, scratch: &mut AttentionScratch) {
        match self {
            Self::Grouped(grouped) => grouped.run(step, out, scratch),
            Self::Latent(latent) => latent.run(step, out, scratch),
        }
    }

    /// Returns all packed weights in order of use.
    pub(super) fn linears(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Grouped(grouped) => vec![&mut grouped.qkv],
            Self::Latent(latent) => {
                let up = latent.query_up.as_mut().map(|(_, up)| up);
                let linears = std::iter::once(&mut latent.down).chain(up);
                linears.chain(&mut latent.absorb).chain(&mut latent.expand).collect()
            }
        }
    }
}

impl AttentionStep<'_, '_> {
    /// Number of keys attended to, summed over all rows.
    fn keys(&self) -> usize {
        let of = |(item, rows): (&StepItem<'_>, &[usize])| {
            let tokens = rows[1] - rows[0];
            tokens * item.kv.len() + tokens * (tokens + 1) / 2
        };
        self.items.iter().zip(self.offsets.windows(2)).map(of).sum()
    }
}

impl Attended<'_, '_> {
    /// Returns the row at which to split the work so that about `share / all` of it comes before the split.
    fn cut(&self, rows: &Range<usize>, share: usize, all: usize) -> usize {
        let items = self.items.iter().zip(self.offsets.windows(2));
        let keys = items.flat_map(|(item, of)| (of[0]..of[1]).zip(item.kv.len() + 1..));
        let keys = keys.filter(|(row, _)| rows.contains(row));
        let total: usize = keys.clone().map(|(_, keys)| keys).sum();
        let mut before = 0;
        let mut until = keys.skip_while(|(_, keys)| {
            before += keys;
            before * all < total * share
        });
        until.next().map_or(rows.end, |(row, _)| row + 1)
    }
}

impl Heads {
    /// Returns one set of buffers for each thread that shares a step's attention.
    pub(super) fn threads<'t>(
        &self,
        step: &AttentionStep<'_, '_>,
        threads: &'t mut Vec<ThreadScratch>,
    ) -> &'t mut [ThreadScratch] {
        let width = self.kv_heads * self.group * (self.key_width + self.value_width);
        let count = threads_for(step.keys() * width).min(step.rows).max(1);
        if threads.len() < count {
            threads.resize_with(count, ThreadScratch::default);
        }
        &mut threads[..count]
    }

    /// Computes attention for a range of a step's rows, with one thread per buffer. `out` is `[rows, kv_heads, group,
    /// value_width]` for these rows.
    pub(super) fn attend(
        &self,
        over: Attended<'_, '_>,
        rows: Range<usize>,
        out: &mut [f32],
        threads: &mut [ThreadScratch],
    ) {
        if let [scratch] = threads {
            return self.attend_rows(over, rows, out, scratch);
        }
        let all = threads.len();
        let (first, second) = threads.split_at_mut(all / 2);
        let middle = over.cut(&rows, first.len(), all);
        let (before, after) = out.split_at_mut((middle - rows.start) * self.out_width());
        both(
            || self.attend(over, rows.start..middle, before, first),
            || self.attend(over, middle..rows.end, after, second),
        );
    }

    /// Elements in one output row.
    fn out_width(&self) -> usize {
        self.kv_heads * self.group * self.value_width
    }

    fn attend_rows(
        &self,
        over: Attended<'_, '_>,
        rows: Range<usize>,
        mut out: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        let query_width = self.kv_heads * self.group * self.key_width;
        for (item, of) in over.items.iter().zip(over.offsets.windows(2)) {
            let (from, to) = (of[0].max(rows.start), of[1].min(rows.end));
            if from >= to {
                continue;
            }
            let queries = &over.queries[of[0] * query_width..of[1] * query_width];
            let sums = out.split_off_mut(..(to - from) * self.out_width()).unwrap_or_default();
            let item = CachedItem { layer: over.layer, cache: item.kv, queries };
            for head in 0..self.kv_heads {
                for first in (from..to).step_by(QUERY_BLOCK) {
                    let block = first - of[0]..to.min(first + QUERY_BLOCK) - of[0];
                    let out = &mut sums[(first - from) * self.out_width()..];
                    self.attend_block(item, head, block, out, scratch);
                }
            }
        }
    }

    /// Computes attention for a block of positions and all query heads that share one key-value head. `out` starts at
    /// the block's first position.
    fn attend_block<'c>(
        &self,
        item: CachedItem<'c>,
        head: usize,
        block: Range<usize>,
        out: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        let CachedItem { layer, cache, queries } = item;
        let Self { kv_heads, group, key_width, value_width, scale } = *self;
        let ThreadScratch { scores, sums, totals, .. } = scratch;
        let rows = block.len() * group;
        // The block's last position attends to all of these keys.
        let keys = cache.len() + block.end;
        let width = keys.next_multiple_of(NR);
        let shape = cache.shape();
        scores.resize(rows * width, 0.0);
        sums.resize(rows * value_width, 0.0);
        totals.clear();

        let queries = &queries[head * (queries.len() / kv_heads) + block.start * group * key_width..];
        let queries = Matrix { data: &queries[..rows * key_width], stride: key_width };
        // Pages are scattered in memory, so each product prefetches the data read next: keys, then values, then the
        // next head's keys.
        let keys_of = |page: &'c Page, head| Matrix { data: page.keys(shape, layer, head), stride: PAGE_TOKENS };
        let values_of = |page: &'c Page| page.values(shape, layer, head);
        let first_page = cache.pages(keys).next().map(|(_, _, page)| page);
        for (first, held, page, after) in cache.pages_ahead(keys) {
            let next = after.map(|page| keys_of(page, head).data).or(first_page.map(values_of));
            let columns = Columns::Rows { matrix: keys_of(page, head), next };
            multiply(
                Sizes { m: rows, k: key_width, n: held.next_multiple_of(NR) },
                queries,
                columns,
                &mut scores[first..],
                width,
            );
        }
        for (row, scores) in scores.chunks_exact_mut(width).enumerate() {
            let visible = cache.len() + block.start + row / group + 1;
            totals.push(softmax(scores, visible, scale));
        }
        let next_head = first_page.filter(|_| head + 1 < kv_heads).map(|page| keys_of(page, head + 1).data);
        for (first, held, page, after) in cache.pages_ahead(keys) {
            let matrix = Matrix { data: values_of(page), stride: shape.value_stride() };
            let next = after.map(values_of).or(next_head);
            let scores = Matrix { data: &scores[first..], stride: width };
            let begin = if first == 0 { Begin::AtZero } else { Begin::AtC };
            multiply_from(
                begin,
                Sizes { m: rows, k: held, n: value_width },
                scores,
                Columns::Rows { matrix, next },
                sums,
                value_width,
            );
        }

        for ((row, sum), total) in sums.chunks_exact(value_width).enumerate().zip(totals) {
            let (token, query_head) = (row / group, head * group + row % group);
            let at = token * self.out_width() + query_head * value_width;
            scale_to(sum, 1.0 / *total, &mut out[at..][..value_width]);
        }
    }
}
