//! Records the state of every unit, and its last decisions.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use schemars::JsonSchema;
use semmoe_planner::policy::Layout;
use serde::Serialize;

use super::Outcome;
use super::unit::Verdict;
use crate::observe::SwitchMetrics;

/// Number of decisions retained per unit.
const KEPT: usize = 16;

/// All units, by name.
pub(crate) struct Records {
    reports: Mutex<BTreeMap<String, Report>>,
    metrics: SwitchMetrics,
}

/// A unit that switches as a whole: a backend, or a model's pools.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Report {
    /// Name of the backend, or of the model's pools if traffic moves between them.
    unit: String,
    /// The actuator that executes the unit's switches: `worker`, `webhook` or `pools`.
    by: &'static str,
    /// `tp` or `ep`; null while unknown.
    layout: Option<&'static str>,
    /// The target layout of a switch in progress.
    switching_to: Option<&'static str>,
    /// The policy's latest reason, or why it was not consulted.
    reason: String,
    /// Fraction of the step time that the other layout would save, if the policy compared them.
    gain: Option<f64>,
    /// Number of running and waiting requests.
    in_flight: u64,
    /// Decisions to switch, newest first.
    decisions: VecDeque<Past>,
}

/// A decision to switch.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct Past {
    unix_seconds: f64,
    to: &'static str,
    /// The policy's reason for the decision.
    reason: String,
    /// `committed`, `refused`, `rolled_back`, `lost`, `stopped`, or `advised` if the decision was only advice.
    outcome: &'static str,
    /// Why the switch failed.
    cause: Option<String>,
    /// How long requests were held.
    seconds: Option<f64>,
}

/// A unit's name and its actuator.
#[derive(Clone, Copy)]
pub(super) struct UnitName<'a> {
    pub(super) name: &'a str,
    pub(super) by: &'static str,
}

impl Records {
    /// Creates empty records. `metrics`: counts the decisions.
    pub(crate) fn new(metrics: SwitchMetrics) -> Self {
        Self { reports: Mutex::default(), metrics }
    }

    /// Returns the reports of all units.
    pub(crate) fn all(&self) -> Vec<Report> {
        self.lock().values().cloned().collect()
    }

    /// Records the start of a switch.
    pub(super) fn begins(&self, unit: UnitName<'_>, to: Layout) {
        self.with(unit, |report| report.switching_to = Some(to.name()));
    }

    fn with(&self, unit: UnitName<'_>, change: impl FnOnce(&mut Report)) {
        let mut reports = self.lock();
        let report = reports.entry(unit.name.to_owned()).or_default();
        unit.name.clone_into(&mut report.unit);
        report.by = unit.by;
        change(report);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Report>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes a unit that is no longer watched.
    pub(super) fn forget(&self, unit: &str) {
        if self.lock().remove(unit).is_some() {
            self.metrics.forget(unit);
        }
    }

    /// Records the policy's verdict on a unit in this layout with this many requests in flight, or why the policy could
    /// not be consulted.
    pub(super) fn observed(&self, unit: UnitName<'_>, layout: Option<Layout>, in_flight: u64, verdict: &Verdict) {
        self.metrics.observed(unit.name, layout, verdict.gain);
        self.with(unit, |report| {
            report.layout = layout.map(Layout::name);
            report.in_flight = in_flight;
            report.gain = verdict.gain;
            report.reason.clone_from(&verdict.reason);
        });
    }

    /// Records the end of a switch; without an outcome the switch was only advised.
    pub(super) fn ended(&self, unit: UnitName<'_>, to: Layout, verdict: &Verdict, outcome: Option<&Outcome>) {
        let seconds = match outcome {
            Some(Outcome::Committed { seconds }) => Some(*seconds),
            _ => None,
        };
        let cause = outcome.and_then(Outcome::cause).map(str::to_owned);
        let is_advice = outcome.is_none();
        let outcome = outcome.map_or("advised", Outcome::name);
        self.metrics.ended(unit.name, to, outcome, seconds);
        let (name, to, reason) = (unit.name, to.name(), verdict.reason.as_str());
        match &cause {
            Some(cause) => tracing::warn!(unit = name, to, outcome, cause, "layout switch failed"),
            None if is_advice => tracing::info!(unit = name, to, reason, "layout switch advised"),
            None => tracing::info!(unit = name, to, outcome, seconds, reason, "layout switch finished"),
        }
        let unix_seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        self.with(unit, |report| {
            if seconds.is_some() {
                report.layout = Some(to);
            }
            report.switching_to = None;
            report.decisions.push_front(Past { unix_seconds, to, reason: reason.to_owned(), outcome, cause, seconds });
            report.decisions.truncate(KEPT);
        });
    }
}
