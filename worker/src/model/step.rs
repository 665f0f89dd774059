//! The input and the output of one step of a rank.

use std::time::Duration;

use super::KvCache;
use super::compute::first_largest;
use super::sampling::Draw;
use crate::ep::StepPhase;

/// Some tokens of one sequence: a whole prompt, a chunk of one, or the token generated last.
pub struct StepItem<'a> {
    /// The sequence so far; the tokens are appended to it when the step succeeds.
    pub kv: &'a mut KvCache,
    /// At least one token id.
    pub tokens: &'a [u32],
    /// Output required after the last of these tokens.
    pub wants: Wants,
    /// The phase that the tokens count for.
    pub phase: StepPhase,
}

/// The output required after an item's last token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Wants {
    /// None: more tokens follow.
    Nothing,
    /// The id of the largest logit: the logits may stay where they were computed.
    Likeliest,
    /// A token drawn at random: the logits may stay there too.
    Drawn(Draw),
    /// The logits.
    Logits,
}

/// The logits, `[V]`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Next<'a> {
    /// `[V]`
    Logits(&'a [f32]),
    /// The id of the largest logit, the lowest id on ties, or the token that was drawn; `None` if the largest is not
    /// finite.
    Token(Option<u32>),
}

/// The id of the largest of the logits `[V]`, the lowest id on ties; `None` if all are NaN.
pub fn likeliest(logits: &[f32]) -> Option<u32> {
    first_largest(logits).and_then(|id| u32::try_from(id).ok())
}

/// Work of a GPU since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct DeviceWork {
    /// Kernels, except those of collectives.
    pub launches: u64,
    /// Reads that waited for the GPU.
    pub synchronisations: u64,
    /// Total time of these waits.
    pub waited: Duration,
    /// Bytes from the host, except those of collectives.
    pub written: u64,
    /// Bytes to the host.
    pub read: u64,
    /// Rows of logits that the host read.
    pub logit_rows: u64,
}

/// The results of one step, in buffers that the next step reuses.
#[derive(Default)]
pub struct StepOutput {
    /// First row of each item in the step's batch, and one past the last.
    pub(super) offsets: Vec<usize>,
    /// The place of each item's result.
    pub(super) results: Vec<ItemResult>,
    /// `[items with logits, V]`
    pub(super) logits: Vec<f32>,
    pub(super) vocab_size: usize,
    /// `[rows, L, k]`
    pub(super) routes: Vec<u16>,
    /// L x k
    pub(super) route_width: usize,
    /// Work of the GPU.
    pub(super) device: Option<DeviceWork>,
}

/// The place of an item's result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ItemResult {
    None,
    /// A row of the logits.
    Logits(usize),
    /// The token itself.
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "the CPU has all logits at hand"))]
    Token(Option<u32>),
}

impl StepOutput {
    /// `[V]`: the logits after the item's last token, if they were required. Panics if there is no such item.
    pub fn logits(&self, item: usize) -> Option<&[f32]> {
        match self.next(item)? {
            Next::Logits(logits) => Some(logits),
            Next::Token(_) => None,
        }
    }

    /// The result after the item's last token, if one was required; a backend that has the logits at hand may return
    /// them also if a token suffices. Panics if there is no such item.
    pub fn next(&self, item: usize) -> Option<Next<'_>> {
        match self.results[item] {
            ItemResult::None => None,
            ItemResult::Logits(row) => Some(Next::Logits(&self.logits[row * self.vocab_size..][..self.vocab_size])),
            ItemResult::Token(token) => Some(Next::Token(token)),
        }
    }

    /// `[tokens of the item, L, k]`: the logical experts of each token, strongest first. Panics if there is no such
    /// item.
    pub fn routes(&self, item: usize) -> &[u16] {
        &self.routes[self.offsets[item] * self.route_width..self.offsets[item + 1] * self.route_width]
    }
}
