//! The rows that a rank was sent in one layer, by source rank; its experts work through them expert by expert.

use semmoe_kernels::{RankOrder, RankRows, add_weighted_rows, argsort_by_rank, gather_rows};
use semmoe_tables::LayerIdx;

use super::exchange::{LocalExperts, NOT_HERE};
use super::wire;

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
    batch: ExpertBatch,
}

/// The rows of one expert.
#[derive(Default)]
struct ExpertBatch {
    rows: Vec<u32>,
    weights: Vec<f32>,
    x: Vec<f32>,
    y: Vec<f32>,
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
    pub(super) fn apply(&mut self, layer: LayerIdx, slots: usize, experts: &mut dyn LocalExperts) {
        let hidden = self.hidden;
        self.sums.clear();
        self.sums.resize(self.rows() * hidden, 0.0);
        argsort_by_rank(&self.pair_slots, slots, &mut self.order).expect("slots were checked on the way in");
        let batch = &mut self.batch;
        for slot in 0..slots {
            let pairs = self.order.items(slot);
            if pairs.is_empty() {
                continue;
            }
            batch.rows.clear();
            batch.rows.extend(pairs.iter().map(|&pair| self.pair_rows[pair as usize]));
            batch.weights.clear();
            batch.weights.extend(pairs.iter().map(|&pair| self.pair_weights[pair as usize]));
            batch.x.resize(pairs.len() * hidden, 0.0);
            batch.y.resize(pairs.len() * hidden, 0.0);
            gather_rows(&self.x, &batch.rows, hidden, &mut batch.x).expect("pairs name rows of the inbox");
            experts.apply(layer, slot, &batch.x, &mut batch.y);
            add_weighted_rows(&batch.y, &batch.rows, &batch.weights, hidden, &mut self.sums)
                .expect("pairs name rows of the inbox");
        }
    }

    /// `[rows of the source, H]`: the sums for one source rank.
    pub(super) fn sums(&self, source: usize) -> &[f32] {
        &self.sums[self.offsets[source] * self.hidden..self.offsets[source + 1] * self.hidden]
    }
}
