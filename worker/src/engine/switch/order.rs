//! Rank 0's commands during a switch, and the ranks' reports.

use serde::{Deserialize, Serialize};

use crate::ep::ExpertPlacement;
use crate::model::{AttentionShape, SwitchOutcome};

/// A command from rank 0 to a rank. Commands arrive in this order, except for `Abort`, which may arrive at any time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum SwitchOrder {
    /// Check that the switch is possible, and store it.
    Prepare(Box<SwitchTo>),
    /// Start no steps until the switch ends.
    Hold,
    /// All ranks hold: do not join steps, either.
    Quiet,
    /// Move, together with all ranks.
    Move,
    /// Drop the switch, or roll it back if ranks are already moving.
    Abort,
}

/// The target of a switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SwitchTo {
    #[serde(rename = "spread")]
    pub(crate) placement: ExpertPlacement,
    pub(crate) attention: AttentionShape,
    /// If set, keys and values move after the switch: before each step, some sequences move at most this many bytes per
    /// rank, but at least one sequence moves. Otherwise, all of them move during the switch.
    pub(crate) kv_step_bytes: Option<u64>,
}

/// A rank's response to a command.
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
    /// Progress of `Move`, from rank 0 only: this MoE layer moves next.
    Layer(u16),
    /// Progress of `Move`, from the first rank of each span: each sequence's new group, which is its rank under dp.
    Homes(Vec<(u64, u16)>),
    /// Reply to `Move`, once the move has ended.
    Ended(SwitchOutcome),
}
