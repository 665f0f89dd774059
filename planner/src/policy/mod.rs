//! Policies for switching a unit between its TP and EP layouts: pure state machines behind one interface.
//!
//! A caller reports events ([`SwitchPolicy::observe`]) and asks at step boundaries ([`SwitchPolicy::decide`]). Time is
//! an argument, in seconds since any fixed origin; a time before the previous one counts as the previous one. Equal
//! calls give equal decisions.
//!
//! | policy | what it knows | switches |
//! |---|---|---|
//! | [`Fixed`] | nothing | never |
//! | [`Adaptive`] | step times by layout and batch, arrivals, switch time at the live KV | when the time saved exceeds the cost of the switch |
//!
//! No policy assumes a step time: [`Adaptive`] uses its [`Prior`] and its measurements, and answers [`Stay::Unknown`]
//! if it has neither.

mod adaptive;
mod arrivals;
mod curve;
mod fixed;
mod learned;
mod memory;
mod settings;

pub use adaptive::{Adaptive, State};
pub use curve::{CurveError, MAX_POINTS, Point, StepCurve};
pub use fixed::Fixed;
pub use learned::{LayoutPrior, Prior};
pub use memory::{Guard, NoRoom, SwitchCost};
pub use settings::{Settings, SettingsError, TtftTarget};

/// The layout of attention and experts over a unit's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Attention by heads, every expert cut over all ranks.
    Tp,
    /// Attention by sequence, whole experts on one rank each.
    Ep,
}

impl Layout {
    /// The other layout.
    pub fn other(self) -> Self {
        match self {
            Layout::Tp => Layout::Ep,
            Layout::Ep => Layout::Tp,
        }
    }

    /// "tp" or "ep".
    pub fn name(self) -> &'static str {
        match self {
            Layout::Tp => "tp",
            Layout::Ep => "ep",
        }
    }
}

/// One value for each layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ByLayout<T> {
    /// The value for [`Layout::Tp`].
    pub tp: T,
    /// The value for [`Layout::Ep`].
    pub ep: T,
}

impl<T> std::ops::Index<Layout> for ByLayout<T> {
    type Output = T;

    fn index(&self, layout: Layout) -> &T {
        match layout {
            Layout::Tp => &self.tp,
            Layout::Ep => &self.ep,
        }
    }
}

impl<T> std::ops::IndexMut<Layout> for ByLayout<T> {
    fn index_mut(&mut self, layout: Layout) -> &mut T {
        match layout {
            Layout::Tp => &mut self.tp,
            Layout::Ep => &mut self.ep,
        }
    }
}

/// A measured step of the unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The layout it ran in.
    pub layout: Layout,
    /// Sequences that decoded one token each.
    pub sequences: u32,
    /// Prompt tokens computed in the same step.
    pub prompt_tokens: u32,
    /// Wall time.
    pub seconds: f64,
}

/// An event that a policy observes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// A request arrived at the unit.
    Arrived {
        /// Prompt tokens that must be computed.
        prompt_tokens: u32,
    },
    /// A step ended.
    Stepped(Step),
    /// A switch was committed.
    Switched {
        /// The current layout.
        to: Layout,
        /// From the last step in the old layout to the first in the new one.
        seconds: f64,
        /// KV tokens that moved.
        kv_tokens: u64,
    },
    /// A switch was refused or rolled back; the old layout continues.
    Failed {
        /// The target layout.
        to: Layout,
    },
}

/// The oldest waiting request of a priority.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// The request's priority; compared with [`TtftTarget::priority`] for equality.
    pub priority: u8,
    /// Seconds since it arrived.
    pub waited_seconds: f64,
    /// Prompt tokens to be computed before its first token, including its own.
    pub tokens_ahead: u64,
}

/// The unit at a step boundary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitView<'a> {
    /// The current layout.
    pub layout: Layout,
    /// Sequences that decode.
    pub running: u32,
    /// Requests without their first token.
    pub waiting: u32,
    /// Uncomputed prompt tokens of the requests without their first token.
    pub waiting_tokens: u64,
    /// Tokens in the KV cache, which a switch moves.
    pub live_kv_tokens: u64,
    /// Tokens that admitted requests may grow to, which must fit the new layout. At least `live_kv_tokens`.
    pub promised_kv_tokens: u64,
    /// The next request waits for KV room rather than for computation.
    pub blocked: bool,
    /// The oldest waiting request of each priority with a target; others may be omitted.
    pub heads: &'a [Head],
}

/// The decision at a step boundary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decision {
    /// Stay in this layout.
    Stay(Stay),
    /// Switch. The policy then waits for [`Event::Switched`] or [`Event::Failed`].
    Switch(Switch),
}

/// A switch and its reason.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// The layout to go to.
    pub to: Layout,
    /// Why.
    pub cause: Cause,
}

/// Why a unit switches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cause {
    /// The other layout saves more time than the switch takes.
    Gain {
        /// Share of a step's time that the other layout saves now.
        gain: f64,
        /// Request-seconds lost in this layout since the other one became better.
        regret: f64,
        /// Seconds that the switch takes at the live KV.
        switch_seconds: f64,
    },
    /// A request with a TTFT target would miss it in this layout and wait less in the other.
    Ttft {
        /// The request's priority.
        priority: u8,
        /// Predicted wait in this layout, from its arrival.
        here_seconds: f64,
        /// Predicted wait after a switch, the switch included.
        there_seconds: f64,
    },
    /// The rule, in words, of a policy defined elsewhere.
    Rule(&'static str),
}

/// Why a unit stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stay {
    /// This policy always considers the layout right.
    Fixed,
    /// No request is running or waiting.
    Idle,
    /// This layout is faster, or nearly.
    Best {
        /// Share of a step's time that the other layout would save; negative if it is slower.
        gain: f64,
    },
    /// The other layout is faster, but not yet for long enough to pay for a switch.
    Unpaid {
        /// Request-seconds lost so far and expected to be lost over the horizon.
        saved: f64,
        /// Request-seconds that switching there and back costs, with the margin.
        needed: f64,
    },
    /// The last switch, or the last failure, is too recent.
    Dwell {
        /// Seconds until the next switch is allowed.
        left_seconds: f64,
    },
    /// A switch is in progress.
    Switching {
        /// The target layout.
        to: Layout,
    },
    /// The KV cache of the other layout cannot hold the tokens reserved for admitted requests.
    NoRoom(NoRoom),
    /// A step time is neither measured nor given.
    Unknown {
        /// The layout of the step.
        layout: Layout,
        /// The batch, in sequences.
        sequences: u32,
    },
}

/// A policy: observes events, and decides at step boundaries.
pub trait SwitchPolicy {
    /// Its name in tables.
    fn name(&self) -> &'static str;
    /// Observes `event` at the time `at` in seconds.
    fn observe(&mut self, at: f64, event: &Event);
    /// Decides for the unit as it is at the time `at` in seconds.
    fn decide(&mut self, at: f64, unit: &UnitView<'_>) -> Decision;
}
