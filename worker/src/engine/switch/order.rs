//! The orders of rank 0 in a switch, and the ranks' reports.

use serde::{Deserialize, Serialize};

use crate::ep::ExpertPlacement;
use crate::model::{AttentionShape, SwitchOutcome};

/// An order from rank 0 to a rank. They arrive in this sequence, except for `Abort`, which may arrive at any time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum SwitchOrder {
    /// Check that the switch is possible, and remember it.
    Prepare(Box<SwitchTo>),
    /// Begin no steps until the switch ends.
    Hold,
    /// All ranks hold: join no step either.
    Quiet,
    /// Move, together with all ranks.
    Move,
    /// Drop the switch; roll back if ranks are already moving.
    Abort,
}

/// The target of a switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SwitchTo {
    #[serde(rename = "spread")]
    pub(crate) placement: ExpertPlacement,
    pub(crate) attention: AttentionShape,
    /// If set, keys and values move after the switch: before each step those of some sequences, at most this many bytes
    /// per rank, but at least one sequence. Otherwise they move during the switch.
    pub(crate) kv_step_bytes: Option<u64>,
}

/// A rank's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum SwitchReport {
    /// Reply to `Prepare`.
    Prepared,
    /// Reply to `Prepare`: the switch is impossible.
    Refused {
        /// The reason.
        reason: String,
    },
    /// Reply to `Hold`.
    Held,
    /// Reply to `Quiet`.
    Quiet,
    /// Progress of `Move`, from rank 0 only: about to move this MoE layer.
    Layer(u16),
    /// Progress of `Move`, from the first rank of each span: the new group of each sequence, with dp its rank.
    Homes(Vec<(u64, u16)>),
    /// Reply to `Move`, at the end.
    Ended(SwitchOutcome),
}
