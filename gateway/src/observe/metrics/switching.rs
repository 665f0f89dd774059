//! Metrics of backends' layouts and layout switches.

use std::sync::atomic::AtomicU64;

use semmoe_planner::policy::Layout;

use super::answers::TO_SECONDS;
use super::labels::{Counter, Family, Gauge, Histogram, Histograms};

labels!(UnitLabels { unit: String });

// `outcome`: `committed`, `refused`, `rolled_back`, `lost`, `stopped`, `advised`.
labels!(DecisionLabels { unit: String, to: &'static str, outcome: &'static str });

metrics! {
    /// Metrics of layout switches. Clones share the counters.
    #[derive(Clone)]
    pub(crate) struct SwitchMetrics {
        layout: Family<UnitLabels, Gauge>, "switch_layout", "Current layout: 0 TP, 1 EP, -1 unknown";
        gain: Family<UnitLabels, Gauge<f64, AtomicU64>>,
            "switch_gain",
            "Fraction of the step time that the other layout would save, as of the policy's last comparison";
        decisions: Family<DecisionLabels, Counter>, "switch_decisions", "Decisions of the switch policy, by outcome";
        seconds: Histograms<UnitLabels> = Family::new_with_constructor(switch_seconds),
            "switch_seconds", "How long committed switches held requests";
    }
}

/// Buckets from the milliseconds that a small model takes to the minute of a large one over a slow link.
fn switch_seconds() -> Histogram {
    Histogram::new(TO_SECONDS.into_iter().chain([10.0, 60.0]))
}

impl SwitchMetrics {
    /// Sets a unit's layout, and the gain if layouts were compared.
    pub(crate) fn observed(&self, unit: &str, layout: Option<Layout>, gain: Option<f64>) {
        let number = match layout {
            Some(Layout::Tp) => 0,
            Some(Layout::Ep) => 1,
            None => -1,
        };
        self.layout.get_or_create(&labels(unit)).set(number);
        if let Some(gain) = gain {
            self.gain.get_or_create(&labels(unit)).set(gain);
        }
    }

    /// Counts a decision by its outcome.
    pub(crate) fn ended(&self, unit: &str, to: Layout, outcome: &'static str, seconds: Option<f64>) {
        self.decisions.get_or_create(&DecisionLabels { unit: unit.to_owned(), to: to.name(), outcome }).inc();
        if let Some(seconds) = seconds {
            self.seconds.get_or_create(&labels(unit)).observe(seconds);
        }
    }

    /// Removes the gauges of a unit that is no longer watched; its counters remain.
    pub(crate) fn forget(&self, unit: &str) {
        self.layout.remove(&labels(unit));
        self.gain.remove(&labels(unit));
    }
}

fn labels(unit: &str) -> UnitLabels {
    UnitLabels { unit: unit.to_owned() }
}
