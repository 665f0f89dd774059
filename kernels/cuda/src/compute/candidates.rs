//! Candidates for sampling a token.

use bytemuck::{Pod, Zeroable};

use super::params::CandidatesParams;
use super::{address, apart, bytes_of};
use crate::calls::ELEMENT_ALIGNMENT;
use crate::error::LaunchError;
use crate::launch::Launch;
use crate::params::SORT_THREADS;
use crate::team::{Buffer, in_range};

/// Returns candidates for each row that requests them: its largest logits, or those around the token that a random
/// number selects. Also returns the sum of all weights, `exp((logit - largest) * scale)`. NaN weighs 0. If the sum is
/// 0, the largest logits are returned.
#[derive(Clone, Copy, Debug)]
pub struct Candidates {
    /// `[rows, vocab]` f32
    pub logits: Buffer,
    /// `[rows]` of [`CandidateAsk`]
    pub asks: Buffer,
    /// `[rows]` of [`CandidateRow`]; a row without a request is not written.
    pub out: Buffer,
    /// Rows.
    pub rows: u64,
    /// Logits per row, at most [`Candidates::MAX_VOCAB`].
    pub vocab: u64,
}

/// A row's request (`CandidateAsk`).
#[derive(Clone, Copy, PartialEq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct CandidateAsk {
    /// 1 / temperature; 0 if the row has no request.
    pub scale: f32,
    /// Selects the token at which the weights, summed by ascending id, exceed this fraction of their total. If
    /// negative, the largest logits are requested.
    pub drawn: f32,
}

/// The answer (`CandidateRow`).
#[derive(Clone, Copy, PartialEq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct CandidateRow {
    /// The sum of all weights, in [`CandidateRow::UNITS`].
    pub total: u64,
    /// The sum of the weights of the ids below the first candidate, if a number selects.
    pub before: u64,
    /// The largest logit; NaN if there is none.
    pub largest: f32,
    /// Candidates.
    pub count: u32,
    /// The first `count` are candidates: consecutive ids if a number selects, otherwise in arbitrary order.
    pub ids: [u32; Candidates::MOST],
    /// Their logits.
    pub logits: [f32; Candidates::MOST],
}

impl CandidateRow {
    /// The fixed-point value of a weight of 1 (`WEIGHT_UNITS`).
    pub const UNITS: f64 = (1_u64 << 42) as f64;
}

impl Candidates {
    /// Maximum number of candidates per row (`CANDIDATES`).
    pub const MOST: usize = 128;
    /// Maximum vocabulary size; the sum of more weights might overflow.
    pub const MAX_VOCAB: u64 = 1 << 20;

    /// # Errors
    /// See [`LaunchError`].
    pub fn launch(&self) -> Result<Launch, LaunchError> {
        let bytes = |size: usize| bytes_of(&[self.rows, size as u64]);
        let params = CandidatesParams {
            logits: address("logits", self.logits, bytes_of(&[self.rows, self.vocab, 4]), ELEMENT_ALIGNMENT)?,
            asks: address("asks", self.asks, bytes(size_of::<CandidateAsk>()), 8)?,
            out: address("candidates", self.out, bytes(size_of::<CandidateRow>()), 8)?,
            rows: in_range("rows", self.rows, 0, i32::MAX as u64)?,
            vocab: in_range("vocabulary", self.vocab, 1, Self::MAX_VOCAB)?,
        };
        let threads = self.vocab.div_ceil(4).next_multiple_of(32).min(u64::from(SORT_THREADS)) as u32;
        apart("semmoe_candidates", [self.rows, 1], threads, &params)
    }
}
