//! Backends that switch between their TP and EP layouts automatically (`[switch]`).
//!
//! | part | purpose |
//! |---|---|
//! | `reading` | a worker's step counters and loads, and the work between two readings (pure) |
//! | `unit` | a policy of `semmoe-planner` with its clock: fed, consulted, notified of outcomes |
//! | `task` | one task per backend: reads it, consults the policy, acts |
//! | `hook` | a switch through the worker's `/switch`: prepare, commit, and every way in which they can fail |
//! | `webhook` | a switch, by an operator's service, of an engine without a hook |
//! | `pools` | new traffic moved between a model's TP and EP backends |
//! | `record` | the state of every unit, and its last decisions, for `GET /admin/switch` |
//!
//! The policy decides but never acts. The outcome of every action is reported back to it, so that a failed switch is
//! retried after a wait, and no failure leaves a backend closed.

mod hook;
mod pools;
mod reading;
mod record;
mod task;
mod unit;
mod webhook;

pub(crate) use pools::watch as watch_pools;
pub(crate) use record::{Records, Report};
pub(crate) use task::watch;

use semmoe_planner::policy::Layout;

/// The outcome of an attempt to switch.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// The new layout runs; requests were held for this long.
    Committed { seconds: f64 },
    /// Nothing was changed. The cause is a text for reports, from responses and errors alike.
    Refused { cause: String },
    /// The switch began, but the old layout is running (again).
    RolledBack { cause: String },
    /// It is unknown which layout is running, or none is.
    Lost { cause: String },
    /// The gateway is shutting down, or no longer watches this backend.
    Stopped,
}

impl Outcome {
    /// Returns the label for metrics and reports.
    fn name(&self) -> &'static str {
        match self {
            Self::Committed { .. } => "committed",
            Self::Refused { .. } => "refused",
            Self::RolledBack { .. } => "rolled_back",
            Self::Lost { .. } => "lost",
            Self::Stopped => "stopped",
        }
    }

    fn cause(&self) -> Option<&str> {
        match self {
            Self::Refused { cause } | Self::RolledBack { cause } | Self::Lost { cause } => Some(cause),
            Self::Committed { .. } | Self::Stopped => None,
        }
    }
}

/// A request to the actuator that executes a switch.
#[derive(Clone, Copy, Debug)]
struct Move {
    from: Layout,
    to: Layout,
}
