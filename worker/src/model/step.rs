//! The input and output of one step on a rank.

use std::time::Duration;

use super::KvCache;
use super::compute::first_largest;
use super::sampling::Draw;
use crate::ep::StepPhase;

/// Tokens of one sequence to process: a whole prompt, a chunk of one, or the last generated token.
pub struct StepItem<'a> {
    /// The sequence so far. The tokens are appended to it once the step succeeds.
    pub kv: &'a mut KvCache,
    /// At least one token id.
    pub tokens: &'a [u32],
    /// The output requested after the last token.
    pub wants: Wants,
    /// The phase under which the tokens are counted.
    pub phase: StepPhase,
}

/// The output requested after an item's last token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Wants {
    /// None: more tokens follow.
    Nothing,
    /// The id of the largest logit; the logits need not leave the device.
    Likeliest,
    /// A randomly drawn token; the logits need not leave the device.
    Drawn(Draw),
    /// The logits.
    Logits,
}

/// The result after an item's last token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Next<'a> {
    /// `[V]`
    Logits(&'a [f32]),
    /// The id of the largest logit (the lowest id on ties) or the drawn token; `None` if the largest logit is not
    /// finite.
    Token(Option<u32>),
}

/// Returns the id of the largest of the logits `[V]`, the lowest id on ties, or `None` if all are NaN.
pub fn likeliest(logits: &[f32]) -> Option<u32> {
    first_largest(logits).and_then(|id| u32::try_from(id).ok())
}

/// GPU work counters since startup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct DeviceWork {
    /// Kernel launches, excluding collectives.
    pub launches: u64,
    /// Reads that waited for the GPU.
    pub synchronisations: u64,
    /// Total time spent in reads that waited for the GPU.
    pub waited: Duration,
    /// Bytes copied from the host, excluding collectives.
    pub written: u64,
    /// Bytes copied to the host.
    pub read: u64,
    /// Logit rows that the host read.
    pub logit_rows: u64,
}

/// The results of one step, in buffers that the next step reuses.
#[derive(Default)]
pub struct StepOutput {
    /// First row of each item in the step's batch, followed by the total number of rows.
    pub(super) offsets: Vec<usize>,
    /// The location of each item's result.
    pub(super) results: Vec<ItemResult>,
    /// `[items with logits, V]`
    pub(super) logits: Vec<f32>,
    pub(super) vocab_size: usize,
    /// `[rows, L, k]`
    pub(super) routes: Vec<u16>,
    /// L x k
    pub(super) route_width: usize,
    /// The GPU's work counters.
    pub(super) device: Option<DeviceWork>,
}

/// The location of an item's result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ItemResult {
    None,
    /// A row index into the logits.
    Logits(usize),
    /// The token itself.
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "the CPU backend always returns full logits"))]
    Token(Option<u32>),
}

impl StepOutput {
    /// Returns the logits `[V]` after the item's last token, if they were requested. Panics if there is no such item.
    pub fn logits(&self, item: usize) -> Option<&[f32]> {
        match self.next(item)? {
            Next::Logits(logits) => Some(logits),
            Next::Token(_) => None,
        }
    }

    /// Returns the result after the item's last token, if one was requested. A backend may return logits even if only a
    /// token was requested. Panics if there is no such item.
    pub fn next(&self, item: usize) -> Option<Next<'_>> {
        match self.results[item] {
            ItemResult::None => None,
            ItemResult::Logits(row) => Some(Next::Logits(&self.logits[row * self.vocab_size..][..self.vocab_size])),
            ItemResult::Token(token) => Some(Next::Token(token)),
        }
    }

    /// Returns the logical experts of each of the item's tokens, strongest first, `[tokens, L, k]`. Panics if there is
    /// no such item.
    pub fn routes(&self, item: usize) -> &[u16] {
        &self.routes[self.offsets[item] * self.route_width..self.offsets[item + 1] * self.route_width]
    }
}
