//! The rows that a rank received in one layer, processed one expert at a time.

use std::ops::Range;

use semmoe_kernels::collectives::{Received, ReceivedRows};
use semmoe_kernels::{RankOrder, add_weighted_rows, argsort_by_rank};

use super::exchange::LocalExperts;
use super::hosts::{LayerHosts, NotHere};
use crate::threads::both;

/// One layer's buffers, reused for the next layer.
#[derive(Default)]
pub(super) struct Inbox {
    /// `[pairs]`: the local slot of each pair's expert.
    slots: Vec<u16>,
    order: RankOrder,
    /// One per thread.
    batches: Vec<ExpertBatch>,
}

/// Scratch buffers for one expert's rows, or for one thread's part of them.
#[derive(Default)]
struct ExpertBatch {
    rows: Vec<u32>,
    weights: Vec<f32>,
    x: Vec<f32>,
    y: Vec<f32>,
    work: Vec<f32>,
}

impl Inbox {
    /// Runs every expert that received rows, in slot order, and sums the results by row.
    ///
    /// # Errors
    /// A row was sent for an expert that is not on this rank.
    pub(super) fn apply(
        &mut self,
        received: Received<'_, f32>,
        hidden: usize,
        hosts: &LayerHosts,
        experts: &dyn LocalExperts,
    ) -> Result<(), NotHere> {
        let Received { rows, pair_rows, experts: of, weights, sums } = received;
        hosts.slots_of(of, |pair| rows.source(pair_rows[pair] as usize), &mut self.slots)?;
        sums.fill(0.0);
        argsort_by_rank(&self.slots, hosts.slots, &mut self.order).expect("slots were just looked up");
        let threads = experts.threads(pair_rows.len()).min(rows.len()).max(1);
        if self.batches.len() < threads {
            self.batches.resize_with(threads, ExpertBatch::default);
        }
        let (slots, order, all) = (hosts.slots, &self.order, 0..rows.len());
        let pairs = RoutedPairs { slots, experts, hidden, x: &rows, rows: pair_rows, weights, order };
        pairs.apply(all, sums, &mut self.batches[..threads]);
        Ok(())
    }
}

/// The input to a layer's experts.
struct RoutedPairs<'a, 'r> {
    slots: usize,
    experts: &'a dyn LocalExperts,
    hidden: usize,
    x: &'a ReceivedRows<'r, f32>,
    /// `[pairs]`: row indices, ascending.
    rows: &'a [u32],
    weights: &'a [f32],
    /// Pairs by slot.
    order: &'a RankOrder,
}

impl RoutedPairs<'_, '_> {
    /// Computes the `[rows, H]` sums for a range of rows, split over one thread per batch.
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

    /// Applies one expert to its rows within the range.
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
        for (to, row) in batch.x.chunks_exact_mut(hidden).zip(&batch.rows) {
            to.copy_from_slice(self.x.row(rows.start + *row as usize));
        }
        self.experts.apply(slot, &batch.x, &mut batch.y, &mut batch.work);
        add_weighted_rows(&batch.y, &batch.rows, &batch.weights, hidden, sums).expect("pairs index the inbox rows");
    }
}
