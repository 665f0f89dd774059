//! The compute backend interface. A backend owns the activations; the host drives the step and assigns rows to ranks.

use std::ops::Range;

use semmoe_kernels::RowSplit;
use semmoe_tables::LayerIdx;

use super::probe::Probe;
use super::step::{StepItem, StepOutput, Wants};
use crate::ep::{ExpertParallel, StepPhase, UnitError};

/// Performs one rank's computations and owns the residual stream rows of all items, concatenated. A step calls the
/// methods in this order, and the layer methods once per layer.
///
/// # Errors
/// All methods fail if a rank failed, possibly this one; the rows are then unspecified and the unit cannot continue.
pub(super) trait ComputeBackend: Send {
    /// Starts a step by embedding its tokens.
    fn embed(&mut self, tokens: &[u32]) -> Result<(), UnitError>;

    /// Adds a layer's attention output to the residual stream and normalises the rows that this rank continues with:
    /// all rows, or with a split, its own rows of the sum over all ranks (SRS, section 3.4 of the paper).
    fn attention(&mut self, step: &mut LayerStep<'_, '_>) -> Result<(), UnitError>;

    /// Selects experts for this rank's rows. Sets `lists.are_kept` if the selection stays in the backend.
    fn route(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError>;

    /// Dispatches the normalised rows to their experts and combines the results.
    fn experts(&mut self, step: &mut LayerStep<'_, '_>, lists: &RowLists) -> Result<(), UnitError>;

    /// Adds the output of the experts (shared expert included) or of the dense layer to the residual stream. With a
    /// split, gathers all rows and, unless they are kept, their selected experts (SAG).
    fn feed_forward(&mut self, step: &mut LayerStep<'_, '_>, lists: &mut RowLists) -> Result<(), UnitError>;

    /// Computes the results for the wanted rows, and copies any expert selections kept by the backend to this rank's
    /// rows of `out`.
    fn head(&mut self, wanted: &WantedRows, out: &mut StepOutput, probe: &mut dyn Probe) -> Result<(), UnitError>;
}

/// One layer of a step.
pub(super) struct LayerStep<'a, 'i> {
    pub(super) layer: usize,
    /// Index among the MoE layers; `None` for a dense layer.
    pub(super) moe: Option<LayerIdx>,
    pub(super) items: &'a mut [StepItem<'i>],
    /// First row of each item, followed by the total number of rows.
    pub(super) offsets: &'a [usize],
    /// With attention tp, the assignment of rows to ranks after attention.
    pub(super) split: Option<RowSplit<'a>>,
    /// Whether the splits of later layers depend on the experts selected in this one.
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "the CPU backend keeps no selections"))]
    pub(super) splits_by_choices: bool,
    pub(super) ep: &'a mut ExpertParallel,
    pub(super) probe: &'a mut dyn Probe,
}

impl LayerStep<'_, '_> {
    /// Number of rows in the step.
    pub(super) fn rows(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// Returns this rank's positions in the split, or all rows without a split.
    pub(super) fn own_positions(&self) -> Range<usize> {
        match &self.split {
            Some(split) => split.positions(self.ep.attention_place()),
            None => 0..self.rows(),
        }
    }
}

/// Per-row lists on the host, reused by later steps.
#[derive(Default)]
pub(super) struct RowLists {
    /// `[rows]`: the phase under which each row is counted.
    pub(super) phases: Vec<StepPhase>,
    /// `[rows, k]`
    pub(super) experts: Vec<u16>,
    /// `[rows, k]`
    pub(super) weights: Vec<f32>,
    /// `[all rows, k]`: the experts of all rows, gathered after a split.
    pub(super) gathered: Vec<u16>,
    /// Whether the backend keeps each layer's experts and weights; [`ComputeBackend::head`] then returns the experts of
    /// all layers.
    pub(super) are_kept: bool,
}

impl RowLists {
    /// Resizes the lists to k experts for each of `rows` rows.
    pub(super) fn resize(&mut self, rows: usize, top_k: usize) -> (&mut [u16], &mut [f32]) {
        self.experts.resize(rows * top_k, 0);
        self.weights.resize(rows * top_k, 0.0);
        (&mut self.experts, &mut self.weights)
    }

    /// Returns the labels sent along with this rank's rows in an allgather, and the buffer for the labels of all rows:
    /// expert ids in an MoE layer, nothing in a dense layer.
    pub(super) fn labels(&mut self, rows: usize, width: usize) -> (&[u16], &mut [u16]) {
        self.gathered.resize(rows * width, 0);
        (if width == 0 { &[] } else { &self.experts }, &mut self.gathered)
    }

    /// Replaces this rank's experts with the gathered experts of all rows.
    pub(super) fn keep_gathered(&mut self) {
        std::mem::swap(&mut self.experts, &mut self.gathered);
    }
}

/// Rows whose logits are needed: the last row of each item that requests output.
#[derive(Default)]
pub(super) struct WantedRows {
    /// Ascending.
    pub(super) rows: Vec<u32>,
    /// `[rows]`: the items.
    pub(super) items: Vec<WantedItem>,
}

/// An item that requests logits or a token.
#[derive(Clone, Copy)]
pub(super) struct WantedItem {
    /// Item index in the step.
    pub(super) at: usize,
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "the CPU backend always returns full logits"))]
    pub(super) wants: Wants,
}
