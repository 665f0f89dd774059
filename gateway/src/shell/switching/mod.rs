//! Backends that change between their TP and EP layouts by themselves (`[switch]`).
//!
//! | part | what |
//! |---|---|
//! | `reading` | a worker's step counters and loads, and what happened between two readings (pure) |
//! | `unit` | a policy of `semmoe-planner` with its clock: fed, asked, notified of outcomes |
//! | `task` | one task for each backend: reads, asks, acts |
//! | `hook` | a switch by the worker's `/switch`: prepare, commit, and every way in which that can fail |
//! | `webhook` | a switch of an engine without a hook, by an operator's service |
//! | `pools` | new traffic moved between the TP and the EP backends of a model |
//! | `record` | where every unit is, and its last decisions, for `GET /admin/switch` |
//!
//! The policy decides and never acts. Whatever an action comes to is reported back to it, so that a failed switch is
//! tried again after its wait, and no failure leaves a backend closed.

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

/// How an attempt to switch ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// The new layout runs; requests were held for so many seconds.
    Committed { seconds: f64 },
    /// Nothing was changed, and this is why.
    Refused { cause: String },
    /// It began, and the old layout runs on.
    RolledBack { cause: String },
    /// It is not known which layout runs, or none does.
    Lost { cause: String },
    /// The gateway ends, or watches this backend no longer.
    Stopped,
}

impl Outcome {
    /// In metrics and reports.
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

/// A request to the part that carries out a switch.
#[derive(Clone, Copy, Debug)]
struct Move {
    from: Layout,
    to: Layout,
}
