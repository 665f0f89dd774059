//! Messages of a control link once the unit runs.

use serde::{Deserialize, Serialize};

use crate::engine::{RankStats, SequenceEvent, SequenceRequest, SwitchOrder, SwitchReport};

/// Rank 0 to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// Run a sequence.
    Submit(Box<SequenceRequest>),
    /// Stop a sequence; answered by its last event whatever has become of it.
    Cancel {
        /// The sequence.
        id: u64,
    },
    /// Report the counts and loads, between two steps.
    Stats {
        /// Comes back with the answer.
        ticket: u64,
    },
    /// Forget the cached prefixes that no sequence holds.
    Flush,
    /// A part of a switch of layouts; answered by [`FromRank::Switch`], but for aborts.
    Switch {
        /// Comes back with the answers.
        ticket: u64,
        /// The step to take.
        order: SwitchOrder,
    },
    /// No sequence is left in the unit and none will come: leave the step loop, but stay connected until this link
    /// closes.
    Stop,
    /// The unit is dead.
    Abort {
        /// Why.
        cause: String,
    },
}

/// A rank to rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromRank {
    /// The model is loaded.
    Ready,
    /// Events of sequences in one step, in order.
    Events(Vec<(u64, SequenceEvent)>),
    /// Answer to [`ToRank::Stats`].
    Stats {
        /// As asked.
        ticket: u64,
        /// The counts and loads.
        stats: Box<RankStats>,
    },
    /// Answer to [`ToRank::Switch`].
    Switch {
        /// As asked.
        ticket: u64,
        /// The rank's answer.
        report: SwitchReport,
    },
    /// Answer to [`ToRank::Stop`].
    Stopped,
    /// This process was asked to stop: the whole unit should.
    Leaving,
    /// This rank cannot continue.
    Fatal {
        /// The rank that failed first, as far as this one knows.
        lost: u16,
        /// One sentence.
        cause: String,
    },
}
