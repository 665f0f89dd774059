//! Messages of a control link while the unit is running.

use serde::{Deserialize, Serialize};

use crate::engine::{RankStats, SequenceEvent, SequenceRequest, SwitchOrder, SwitchReport};

/// From rank 0 to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// Runs a sequence.
    Submit(Box<SequenceRequest>),
    /// Stops a sequence; its last event answers, however it ended.
    Cancel {
        /// The sequence.
        id: u64,
    },
    /// Reports counts and loads between two steps.
    Stats {
        /// Repeated in the answer.
        ticket: u64,
    },
    /// Drops the cached prefixes that no sequence uses.
    Flush,
    /// A step of a layout switch; answered by [`FromRank::Switch`], except for aborts.
    Switch {
        /// Identifies the step; answers repeat it.
        ticket: u64,
        /// The step to take.
        order: SwitchOrder,
    },
    /// No sequence is left and none will follow: the rank leaves the step loop, but stays connected until this link
    /// closes.
    Stop,
    /// The unit has failed.
    Abort {
        /// The cause.
        cause: String,
    },
}

/// From a rank to rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromRank {
    /// The model is loaded.
    Ready,
    /// Events of sequences in one step, in order.
    Events(Vec<(u64, SequenceEvent)>),
    /// Answer to [`ToRank::Stats`].
    Stats {
        /// The ticket of the request.
        ticket: u64,
        /// The counts and loads.
        stats: Box<RankStats>,
    },
    /// Answer to [`ToRank::Switch`].
    Switch {
        /// The ticket of the request.
        ticket: u64,
        /// The rank's answer.
        report: SwitchReport,
    },
    /// Answer to [`ToRank::Stop`].
    Stopped,
    /// This process was asked to stop, so the whole unit should.
    Leaving,
    /// This rank cannot continue.
    Fatal {
        /// The rank that failed first, as far as this one knows.
        lost: u16,
        /// One sentence.
        cause: String,
    },
}
