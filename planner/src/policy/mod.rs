//! Policies for switching a unit between its TP and EP layouts: pure state machines behind one interface.
//!
//! Callers report events ([`SwitchPolicy::observe`]) and request decisions at step boundaries
//! ([`SwitchPolicy::decide`]). Time is passed as an argument, in seconds since any fixed origin; it is clamped so that
//! it never decreases. Decisions are deterministic.
//!
//! | policy | information used | switches |
//! |---|---|---|
//! | [`Fixed`] | nothing | never |
//! | [`Adaptive`] | step times by layout and batch size, arrivals, switch time at the live KV | when the time saved
//! exceeds the cost of the switch |
//!
//! No policy assumes step times: [`Adaptive`] uses its [`Prior`] and measurements, and returns [`Stay::Unknown`] if it
//! has neither.

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

/// How attention and experts are divided over a unit's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Attention divided by heads, every expert sliced over all ranks.
    Tp,
    /// Attention divided by sequence, each expert whole on one rank.
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

/// One value per layout.
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
    /// The layout that the step ran in.
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
        /// Number of prompt tokens to compute.
        prompt_tokens: u32,
    },
    /// A step ended.
    Stepped(Step),
    /// A switch was committed.
    Switched {
        /// The current layout.
        to: Layout,
        /// Seconds from the last step in the old layout to the first step in the new layout.
        seconds: f64,
        /// Number of KV tokens moved.
        kv_tokens: u64,
    },
    /// A switch was rejected or rolled back; the unit continues in the old layout.
    Failed {
        /// The target layout.
        to: Layout,
    },
}

/// The oldest waiting request with a given priority.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// The request's priority, which selects the matching [`TtftTarget::priority`].
    pub priority: u8,
    /// Seconds since the request arrived.
    pub waited_seconds: f64,
    /// Prompt tokens to compute before the request's first token, including its own.
    pub tokens_ahead: u64,
}

/// The unit's state at a step boundary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitView<'a> {
    /// The current layout.
    pub layout: Layout,
    /// Number of decoding sequences.
    pub running: u32,
    /// Number of requests without a first token yet.
    pub waiting: u32,
    /// Uncomputed prompt tokens of requests without a first token yet.
    pub waiting_tokens: u64,
    /// Tokens in the KV cache, which a switch moves.
    pub live_kv_tokens: u64,
    /// Tokens that admitted requests may grow to, which must fit in the new layout's cache. At least `live_kv_tokens`.
    pub promised_kv_tokens: u64,
    /// Whether the next request is waiting for KV room rather than for computation.
    pub blocked: bool,
    /// The oldest waiting request of each priority that has a target; others may be omitted.
    pub heads: &'a [Head],
}

/// The decision at a step boundary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decision {
    /// Stay in the current layout.
    Stay(Stay),
    /// Switch. The policy then waits for [`Event::Switched`] or [`Event::Failed`].
    Switch(Switch),
}

/// A switch and its reason.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// The target layout.
    pub to: Layout,
    /// Why.
    pub cause: Cause,
}

/// The reason for a switch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cause {
    /// The other layout saves more time than the switch takes.
    Gain {
        /// Fraction of the step time that the other layout currently saves.
        gain: f64,
        /// Request-seconds lost in this layout since the other layout became faster.
        regret: f64,
        /// Expected switch duration at the live KV, in seconds.
        switch_seconds: f64,
    },
    /// A request would miss its TTFT target in this layout and wait less in the other layout.
    Ttft {
        /// The request's priority.
        priority: u8,
        /// Predicted wait in this layout, from the request's arrival.
        here_seconds: f64,
        /// Predicted wait if the unit switches, including the switch.
        there_seconds: f64,
    },
    /// A textual rule, for policies defined elsewhere.
    Rule(&'static str),
}

/// The reason for staying in the current layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stay {
    /// The policy never switches.
    Fixed,
    /// No request is running or waiting.
    Idle,
    /// This layout is faster, or about as fast.
    Best {
        /// Fraction of the step time that the other layout would save; negative if it is slower.
        gain: f64,
    },
    /// The other layout is faster, but not yet for long enough to pay for a switch.
    Unpaid {
        /// Request-seconds lost so far and expected to be lost over the horizon.
        saved: f64,
        /// Request-seconds that switching there and back costs, including the margin.
        needed: f64,
    },
    /// The last switch or failure is too recent.
    Dwell {
        /// Seconds until the next switch is allowed.
        left_seconds: f64,
    },
    /// A switch is in progress.
    Switching {
        /// The target layout.
        to: Layout,
    },
    /// The other layout's KV cache has no room for the tokens reserved for admitted requests.
    NoRoom(NoRoom),
    /// A step time is neither measured nor known from the prior.
    Unknown {
        /// The layout of the step.
        layout: Layout,
        /// The batch size in sequences.
        sequences: u32,
    },
}

/// A switch policy: observes events and decides at step boundaries.
pub trait SwitchPolicy {
    /// Returns the policy's name for tables.
    fn name(&self) -> &'static str;
    /// Observes `event` at time `at`, in seconds.
    fn observe(&mut self, at: f64, event: &Event);
    /// Decides for the unit in its state at time `at`, in seconds.
    fn decide(&mut self, at: f64, unit: &UnitView<'_>) -> Decision;
}
