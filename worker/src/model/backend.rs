//! The interface of compute backends: a backend owns the rows, the host makes the decisions about them.

use std::ops::Range;

use semmoe_kernels::RowSplit;
use semmoe_tables::LayerIdx;

use super::probe::Probe;
use super::step::{StepItem, StepOutput, Wants};
use crate::ep::{ExpertParallel, StepPhase, UnitError};

/// One rank's arithmetic, which owns the rows of the residual stream: those of all items, one item after the other.
/// Methods are called in this order, those of a layer once per layer.
///
/// # Errors
/// For all methods: a rank failed, possibly this one; the rows are then unspecified and the unit cannot continue.
pub(super) trait ComputeBackend: Send {
    /// Begins a step of these tokens.
    fn embed(&mut self, tokens: &[u32]) -> Result<(), UnitError>;

    /// Adds a layer's attention to the residual stream, and norms the rows that this rank continues with: all of them,
    /// or with a split its part of the sums over all ranks (SRS, section 3.4 of the paper).
    fn attention(&mut self, step: &mut LayerStep<'_, '_>) -> Result<(), UnitError>;

    /// Chooses the experts of these rows. Sets `lists.are_kept` if they stay with the backend.
    fn route(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError>;

    /// Sends the normed rows to their experts and back.
    fn experts(&mut self, step: &mut LayerStep<'_, '_>, lists: &RowLists) -> Result<(), UnitError>;

    /// Adds the output of the experts, including the shared one, or of a dense layer; with a split, gathers all rows
    /// and the experts that they went to (SAG).
    fn feed_forward(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError>;

    /// The results of some rows, and the experts that the backend kept.
    fn head(&mut self, wanted: &WantedRows, out: &mut StepOutput, probe: &mut dyn Probe) -> Result<(), UnitError>;
}

/// One layer of a step.
pub(super) struct LayerStep<'a, 'i> {
    pub(super) layer: usize,
    /// Index among the MoE layers, if it is one.
    pub(super) moe: Option<LayerIdx>,
    pub(super) items: &'a mut [StepItem<'i>],
    /// First row of each item, and one past the last.
    pub(super) offsets: &'a [usize],
    /// With attention tp: which rows go to which rank after attention.
    pub(super) split: Option<RowSplit<'a>>,
    pub(super) ep: &'a mut ExpertParallel,
    pub(super) probe: &'a mut dyn Probe,
}

impl LayerStep<'_, '_> {
    /// All rows of the step.
    pub(super) fn rows(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// This rank's positions in the split; without one, all rows.
    pub(super) fn own_positions(&self) -> Range<usize> {
        match &self.split {
            Some(split) => split.positions(self.ep.attention_place()),
            None => 0..self.rows(),
        }
    }
}

/// The host's lists for a rank's rows; reused by later steps.
#[derive(Default)]
pub(super) struct RowLists {
    /// `[rows]`: the phase that each row counts for.
    pub(super) phases: Vec<StepPhase>,
    /// `[rows, k]`
    pub(super) experts: Vec<u16>,
    /// `[rows, k]`
    pub(super) weights: Vec<f32>,
    /// `[all rows, k]`: the experts of the rows that a split gathered.
    pub(super) gathered: Vec<u16>,
    /// The backend keeps the experts and weights of each layer; [`ComputeBackend::head`] returns the experts of all.
    pub(super) are_kept: bool,
}

impl RowLists {
    /// Resizes the lists to `rows` choices of k experts.
    pub(super) fn resize(&mut self, rows: usize, top_k: usize) -> (&mut [u16], &mut [f32]) {
        self.experts.resize(rows * top_k, 0);
        self.weights.resize(rows * top_k, 0.0);
        (&mut self.experts, &mut self.weights)
    }

    /// The labels that accompany this rank's rows in an allgather, and room for those of all rows: experts in an MoE
    /// layer, otherwise none.
    pub(super) fn labels(&mut self, rows: usize, width: usize) -> (&[u16], &mut [u16]) {
        self.gathered.resize(rows * width, 0);
        (if width == 0 { &[] } else { &self.experts }, &mut self.gathered)
    }

    /// Makes the experts of all rows the current ones.
    pub(super) fn keep_gathered(&mut self) {
        std::mem::swap(&mut self.experts, &mut self.gathered);
    }
}

/// The rows whose logits are needed: the last one of each item that needs any.
#[derive(Default)]
pub(super) struct WantedRows {
    /// Ascending.
    pub(super) rows: Vec<u32>,
    /// `[rows]`: the items.
    pub(super) items: Vec<WantedItem>,
}

/// An item that needs logits or the likeliest token.
#[derive(Clone, Copy)]
pub(super) struct WantedItem {
    /// Its index in the step.
    pub(super) at: usize,
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "the CPU has all logits at hand"))]
    pub(super) wants: Wants,
}
