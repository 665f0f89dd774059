//! The rows that a rank was sent in one layer, by source rank; its experts work through them expert by expert.

use std::ops::Range;

use semmoe_kernels::{RankOrder, RankRows, add_weighted_rows, argsort_by_rank, gather_rows};
use semmoe_tables::LayerIdx;

use super::exchange::{LocalExperts, NOT_HERE};
use super::wire;
use crate::threads::both;

/// Rows of all source ranks in rank order, and the sums that go back; reused between layers.
#[derive(Default)]
pub(super) struct Inbox {
    hidden: usize,
    /// The first row of each source so far, and one past the last.
    offsets: Vec<usize>,
    /// `[rows, H]`
    x: Vec<f32>,
    /// `[pairs]`: the row, this rank's slot of the expert, and the weight.
    pair_rows: Vec<u32>,
    pair_slots: Vec<u16>,
    pair_weights: Vec<f32>,
    /// `[rows, H]`: sums of weight x expert(x).
    sums: Vec<f32>,
    order: RankOrder,
    /// One for each thread.
    batches: Vec<ExpertBatch>,
}

/// The rows of one expert, or those that a thread has of them.
#[derive(Default)]
struct ExpertBatch {
    rows: Vec<u32>,
    weights: Vec<f32>,
    x: Vec<f32>,
    y: Vec<f32>,
    work: Vec<f32>,
}

impl Inbox {
    pub(super) fn clear(&mut self, hidden: usize) {
        self.hidden = hidden;
        self.offsets.clear();
        self.offsets.push(0);
        self.x.clear();
        self.pair_rows.clear();
        self.pair_slots.clear();
        self.pair_weights.clear();
    }

    /// Adds the next source: this rank itself; `x` `[n, H]` holds the rows of all its tokens.
    pub(super) fn push_own(&mut self, rows: RankRows<'_>, x: &[f32], slot_of: &[u16]) {
        let first_row = self.rows();
        for &token in rows.tokens {
            self.x.extend_from_slice(&x[token as usize * self.hidden..][..self.hidden]);
        }
        self.push_pair_rows(first_row, rows.pairs.iter().copied());
        self.pair_slots.extend(rows.experts.iter().map(|&expert| slot_of[usize::from(expert)]));
        self.pair_weights.extend_from_slice(rows.weights);
        self.offsets.push(first_row + rows.tokens.len());
    }

    /// Adds the next source: a peer's dispatch message.
    ///
    /// Errors say what is wrong with it: lengths, pair counts that do not sum up, an expert that is not on this rank.
    pub(super) fn push_message(&mut self, message: &[u8], slot_of: &[u16]) -> Result<(), String> {
        let parts = wire::split_dispatch(message, self.hidden)?;
        let first_row = self.rows();
        let counted: usize = wire::u16s(parts.pair_counts).map(usize::from).sum();
        let pairs = parts.experts.len() / 2;
        if counted != pairs || wire::u16s(parts.pair_counts).any(|count| count == 0) {
            return Err(format!("pair counts that sum to {counted} with none zero, expected {pairs}"));
        }
        for expert in wire::u16s(parts.experts) {
            match slot_of.get(usize::from(expert)) {
                Some(&slot) if slot != NOT_HERE => self.pair_slots.push(slot),
                _ => return Err(format!("a token for expert {expert}, which is not on this rank")),
            }
        }
        self.push_pair_rows(first_row, wire::u16s(parts.pair_counts));
        wire::append_f32s(parts.weights, &mut self.pair_weights);
        wire::append_f32s(parts.x, &mut self.x);
        self.offsets.push(first_row + parts.rows);
        Ok(())
    }

    fn push_pair_rows(&mut self, first_row: usize, counts: impl Iterator<Item = u16>) {
        for (row, count) in (first_row as u32..).zip(counts) {
            self.pair_rows.extend(std::iter::repeat_n(row, usize::from(count)));
        }
    }

    /// Rows of all sources so far.
    fn rows(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// Runs every expert that has rows, in slot order, and sums up per row.
    pub(super) fn apply(&mut self, layer: LayerIdx, slots: usize, experts: &dyn LocalExperts) {
        let rows = self.rows();
        self.sums.clear();
        self.sums.resize(rows * self.hidden, 0.0);
        argsort_by_rank(&self.pair_slots, slots, &mut self.order).expect("slots were checked on the way in");
        let threads = experts.threads(self.pair_rows.len()).min(rows).max(1);
        if self.batches.len() < threads {
            self.batches.resize_with(threads, ExpertBatch::default);
        }
        let Self { hidden, x, pair_rows, pair_weights, order, .. } = self;
        let pairs =
            RoutedPairs { layer, slots, experts, hidden: *hidden, x, rows: pair_rows, weights: pair_weights, order };
        pairs.apply(0..rows, &mut self.sums, &mut self.batches[..threads]);
    }

    /// `[rows of the source, H]`: the sums for one source rank.
    pub(super) fn sums(&self, source: usize) -> &[f32] {
        &self.sums[self.offsets[source] * self.hidden..self.offsets[source + 1] * self.hidden]
    }
}

/// What the experts of a layer work through.
struct RoutedPairs<'a> {
    layer: LayerIdx,
    slots: usize,
    experts: &'a dyn LocalExperts,
    hidden: usize,
    /// `[rows, H]`
    x: &'a [f32],
    /// `[pairs]`: rows ascend.
    rows: &'a [u32],
    weights: &'a [f32],
    /// Pairs by slot.
    order: &'a RankOrder,
}

impl RoutedPairs<'_> {
    /// Adds up `[rows, H]` for some of the rows, shared among as many threads as there are batches.
    fn apply(&self, rows: Range<usize>, sums: &mut [f32], batches: &mut [ExpertBatch]) {
        if let [batch] = batches {
            return (0..self.slots).for_each(|slot| self.apply_expert(slot, &rows, sums, batch));
        }
        let all = batches.len();
        let (first, second) = batches.split_at_mut(all / 2);
        let middle = rows.start + rows.len() * first.len() / all;
        let (before, after) = sums.split_at_mut((middle - rows.start) * self.hidden);
        both(|| self.apply(rows.start..middle, before, first), || self.apply(middle..rows.end, after, second));
    }

    /// One expert on those of the rows that go to it.
    fn apply_expert(&self, slot: usize, rows: &Range<usize>, sums: &mut [f32], batch: &mut ExpertBatch) {
        let hidden = self.hidden;
        let row_of = |pair: &u32| self.rows[*pair as usize] as usize;
        let pairs = self.order.items(slot);
        let pairs = &pairs[pairs.partition_point(|pair| row_of(pair) < rows.start)..];
        let pairs = &pairs[..pairs.partition_point(|pair| row_of(pair) < rows.end)];
        if pairs.is_empty() {
            return;
        }
        batch.rows.clear();
        batch.rows.extend(pairs.iter().map(|pair| (row_of(pair) - rows.start) as u32));
        batch.weights.clear();
        batch.weights.extend(pairs.iter().map(|&pair| self.weights[pair as usize]));
        batch.x.resize(pairs.len() * hidden, 0.0);
        batch.y.resize(pairs.len() * hidden, 0.0);
        let x = &self.x[rows.start * hidden..rows.end * hidden];
        gather_rows(x, &batch.rows, hidden, &mut batch.x).expect("pairs name rows of the inbox");
        self.experts.apply(self.layer, slot, &batch.x, &mut batch.y, &mut batch.work);
        add_weighted_rows(&batch.y, &batch.rows, &batch.weights, hidden, sums).expect("pairs name rows of the inbox");
    }
}
