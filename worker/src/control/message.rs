//! Messages of a control link while the unit is running.

use serde::{Deserialize, Serialize};

use crate::engine::{RankStats, SequenceEvent, SequenceRequest, SwitchOrder, SwitchReport};

/// A message from rank 0 to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// Runs a sequence.
    Submit(Box<SequenceRequest>),
    /// Cancels a sequence; its last event is the reply, however it ended.
    Cancel {
        /// The sequence.
        id: u64,
    },
    /// Reports statistics between two steps.
    Stats {
        /// Repeated in the answer.
        ticket: u64,
    },
    /// Evicts cached prefixes that no sequence uses.
    Flush,
    /// A step of a layout switch; the reply is [`FromRank::Switch`], except for aborts.
    Switch {
        /// Identifies the switch; replies repeat it.
        ticket: u64,
        /// The step to take.
        order: SwitchOrder,
    },
    /// No sequences remain and none will follow: the rank leaves the step loop, but stays connected until this link
    /// closes.
    Stop,
    /// The unit has failed.
    Abort {
        /// The cause.
        cause: String,
    },
}

/// A message from a rank to rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromRank {
    /// The model is loaded.
    Ready,
    /// The sequence events of one step, in order.
    Events(Vec<(u64, SequenceEvent)>),
    /// Answer to [`ToRank::Stats`].
    Stats {
        /// The ticket sent in the request.
        ticket: u64,
        /// The counts and loads.
        stats: Box<RankStats>,
    },
    /// Answer to [`ToRank::Switch`].
    Switch {
        /// The ticket sent in the request.
        ticket: u64,
        /// The rank's answer.
        report: SwitchReport,
    },
    /// Answer to [`ToRank::Stop`].
    Stopped,
    /// This process was asked to stop, so the whole unit must stop.
    Leaving,
    /// This rank cannot continue.
    Fatal {
        /// The rank that failed first, as far as this rank knows.
        lost: u16,
        /// One sentence.
        cause: String,
    },
}
