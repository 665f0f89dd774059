//! The input and the output of one step of a rank.

use super::KvCache;
use super::compute::first_largest;
use crate::ep::StepPhase;

/// Some tokens of one sequence: a whole prompt, a chunk of one, or the one token that was generated last.
pub struct StepItem<'a> {
    /// The sequence so far; the tokens are appended to it when the step succeeds.
    pub kv: &'a mut KvCache,
    /// At least one token id.
    pub tokens: &'a [u32],
    /// Whether the logits after the last of these tokens are wanted.
    pub want_logits: bool,
    /// The phase that the tokens are counted in.
    pub phase: StepPhase,
}

/// The id of the largest of the logits `[V]`, the lowest of equal ones; none if all are NaN.
pub fn likeliest(logits: &[f32]) -> Option<u32> {
    first_largest(logits).and_then(|id| u32::try_from(id).ok())
}

/// The results of one step, in buffers that the next step reuses.
#[derive(Default)]
pub struct StepOutput {
    /// First row of each item in the step's batch, and one past the last.
    pub(super) offsets: Vec<usize>,
    /// The row of `logits` of each item.
    pub(super) logit_rows: Vec<Option<usize>>,
    /// `[wanted items, V]`
    pub(super) logits: Vec<f32>,
    pub(super) vocab_size: usize,
    /// `[rows, L, k]`
    pub(super) routes: Vec<u16>,
    /// L x k
    pub(super) route_width: usize,
}

impl StepOutput {
    /// `[V]`: the logits after the item's last token, if they were wanted. Panics if there is no such item.
    pub fn logits(&self, item: usize) -> Option<&[f32]> {
        let row = self.logit_rows[item]?;
        Some(&self.logits[row * self.vocab_size..][..self.vocab_size])
    }

    /// `[tokens of the item, L, k]`: the logical experts of each token, strongest first. Panics if there is no such
    /// item.
    pub fn routes(&self, item: usize) -> &[u16] {
        &self.routes[self.offsets[item] * self.route_width..self.offsets[item + 1] * self.route_width]
    }
}
