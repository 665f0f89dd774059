//! Policies without a choice: one layout forever, or one for each phase known beforehand.

use super::gate::Gate;
use super::{Cause, Decision, Event, Guard, Layout, Stay, SwitchPolicy, UnitView};

/// Never switches.
#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    /// Of the unit it is asked for.
    pub layout: Layout,
}

impl SwitchPolicy for Fixed {
    fn name(&self) -> &'static str {
        match self.layout {
            Layout::Tp => "static tp",
            Layout::Ep => "static ep",
        }
    }

    fn observe(&mut self, _at: f64, _event: &Event) {}

    fn decide(&mut self, _at: f64, _unit: &UnitView<'_>) -> Decision {
        Decision::Stay(Stay::Fixed)
    }
}

/// A stretch of time and its layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    /// When it begins.
    pub at: f64,
    /// The layout it runs in.
    pub layout: Layout,
}

/// The layout of every phase is given beforehand; a benchmark's oracle. It switches at the first step boundary of a
/// phase at which the KV cache fits.
#[derive(Clone, Debug)]
pub struct Phases {
    phases: Vec<Phase>,
    gate: Gate,
}

impl Phases {
    /// `phases` in order of time; before the first one the first one's layout holds.
    pub fn new(phases: Vec<Phase>, guard: Guard) -> Self {
        Phases { phases, gate: Gate::new(guard) }
    }
}

impl SwitchPolicy for Phases {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn observe(&mut self, _at: f64, event: &Event) {
        self.gate.observe(event);
    }

    fn decide(&mut self, at: f64, unit: &UnitView<'_>) -> Decision {
        if let Err(stay) = self.gate.update(unit) {
            return Decision::Stay(stay);
        }
        let index = self.phases.partition_point(|phase| phase.at <= at).saturating_sub(1);
        let Some(to) = self.phases.get(index).map(|phase| phase.layout).filter(|&to| to != unit.layout) else {
            return Decision::Stay(Stay::Fixed);
        };
        self.gate.pass(unit, to, Cause::Phase { index })
    }
}
