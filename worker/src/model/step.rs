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
#[derive(Clone, Copy)]
pub struct StepOutput<'a> {
    pub(super) buffers: &'a OutputBuffers,
}

/// Where a model keeps the results of a step.
#[derive(Default)]
pub(super) struct OutputBuffers {
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

impl<'a> StepOutput<'a> {
    /// `[V]`: the logits after the item's last token, if they were wanted. Panics if there is no such item.
    pub fn logits(&self, item: usize) -> Option<&'a [f32]> {
        let row = self.buffers.logit_rows[item]?;
        let vocab = self.buffers.vocab_size;
        Some(&self.buffers.logits[row * vocab..][..vocab])
    }

    /// `[tokens of the item, L, k]`: the logical experts of each token, strongest first. Panics if there is no such
    /// item.
    pub fn routes(&self, item: usize) -> &'a [u16] {
        let (from, to) = (self.buffers.offsets[item], self.buffers.offsets[item + 1]);
        let width = self.buffers.route_width;
        &self.buffers.routes[from * width..to * width]
    }
}
