//! When a unit should change between its TP and EP layouts: pure state machines behind one interface.
//!
//! A caller reports what happens ([`SwitchPolicy::observe`]) and asks at step boundaries ([`SwitchPolicy::decide`]).
//! Time is an argument, in seconds since any fixed origin; a time before the last one counts as the last one. The same
//! calls give the same decisions.
//!
//! | policy | what it knows | switches |
//! |---|---|---|
//! | [`Fixed`] | nothing | never |
//! | [`Adaptive`] | step times by layout and batch, arrivals, switch time at the live KV | when the time saved exceeds
//! the switch |
//!
//! No policy assumes a step time: [`Adaptive`] uses what it was given as a [`Prior`] and what it has measured since,
//! and answers [`Stay::Unknown`] where it has neither.

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

/// How attention and experts of a unit lie on its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Attention by heads, every expert cut over all ranks.
    Tp,
    /// Attention by sequence, whole experts on one rank each.
    Ep,
}

impl Layout {
    /// The other one.
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByLayout<T> {
    /// Of [`Layout::Tp`].
    pub tp: T,
    /// Of [`Layout::Ep`].
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

/// One step of the unit as it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The layout it ran in.
    pub layout: Layout,
    /// Sequences that decoded one token each.
    pub sequences: u32,
    /// Prompt tokens computed beside them.
    pub prompt_tokens: u32,
    /// Wall time.
    pub seconds: f64,
}

/// An event that a policy observes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// A request came to the unit.
    Arrived {
        /// Tokens of its prompt that are to be computed.
        prompt_tokens: u32,
    },
    /// A step ended.
    Stepped(Step),
    /// A switch was committed.
    Switched {
        /// The layout that runs now.
        to: Layout,
        /// From the last step in the old layout to the first in the new one.
        seconds: f64,
        /// KV tokens that moved.
        kv_tokens: u64,
    },
    /// A switch was refused or rolled back; the old layout runs on.
    Failed {
        /// The layout that was not reached.
        to: Layout,
    },
}

/// The oldest waiting request of a priority.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// As the request says; compared with [`TtftTarget::priority`] for equality.
    pub priority: u8,
    /// Seconds since it arrived.
    pub waited_seconds: f64,
    /// Prompt tokens to be computed up to its first token, its own included.
    pub tokens_ahead: u64,
}

/// The unit at a step boundary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitView<'a> {
    /// The layout that runs.
    pub layout: Layout,
    /// Sequences that decode.
    pub running: u32,
    /// Requests without their first token.
    pub waiting: u32,
    /// Prompt tokens of those that are not computed yet.
    pub waiting_tokens: u64,
    /// Tokens in the KV cache: what a switch moves.
    pub live_kv_tokens: u64,
    /// Tokens that admitted requests may come to hold: what must fit the new layout. At least `live_kv_tokens`.
    pub promised_kv_tokens: u64,
    /// The next request waits for KV room, not for computation.
    pub blocked: bool,
    /// The oldest waiting request of each priority that has a target; others are not needed.
    pub heads: &'a [Head],
}

/// The decision at a step boundary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decision {
    /// Go on in this layout.
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
        /// Request-seconds lost by not being there already, since it became better.
        regret: f64,
        /// Seconds that the switch takes at the live KV.
        switch_seconds: f64,
    },
    /// A request with a target for its first token would miss it here and wait less there.
    Ttft {
        /// Of that request.
        priority: u8,
        /// Predicted wait in this layout, from its arrival.
        here_seconds: f64,
        /// Predicted wait after a switch, the switch included.
        there_seconds: f64,
    },
    /// A policy of another crate: its rule, in words.
    Rule(&'static str),
}

/// Why a unit stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stay {
    /// By this policy the unit is in the right layout.
    Fixed,
    /// Nothing runs or waits.
    Idle,
    /// This layout is the faster one, or nearly.
    Best {
        /// Share of a step's time that the other layout would save; negative where it is slower.
        gain: f64,
    },
    /// The other layout is faster, but has not been for long enough to pay for a switch.
    Unpaid {
        /// Request-seconds lost so far and expected to be lost over the horizon.
        saved: f64,
        /// Request-seconds that a switch there and back takes, with the margin.
        needed: f64,
    },
    /// The last switch, or the last failure, is too recent.
    Dwell {
        /// Seconds until the next one may be.
        left_seconds: f64,
    },
    /// A switch is under way.
    Switching {
        /// The layout it leads to.
        to: Layout,
    },
    /// The KV cache of the other layout could not hold what is promised.
    NoRoom(NoRoom),
    /// A step time is neither measured nor given.
    Unknown {
        /// In this layout.
        layout: Layout,
        /// At this batch.
        sequences: u32,
    },
}

/// A policy: informed of what happens, asked at step boundaries.
pub trait SwitchPolicy {
    /// Its name in tables.
    fn name(&self) -> &'static str;
    /// Takes note of `event`, at the time `at` in seconds.
    fn observe(&mut self, at: f64, event: &Event);
    /// Decides for the unit as it is at the time `at` in seconds.
    fn decide(&mut self, at: f64, unit: &UnitView<'_>) -> Decision;
}
