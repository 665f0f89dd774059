//! The benchmarks' oracle, which knows the best layout of each phase in advance; and the guard against a second switch
//! while one is under way.

use semmoe_planner::policy::{Cause, Decision, Event, Guard, Layout, Stay, Switch, SwitchPolicy, UnitView};

/// A period of time and its layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    /// When it begins.
    pub at: f64,
    /// Its layout.
    pub layout: Layout,
}

/// A benchmark's oracle: the layout of every phase is given in advance. It switches at the first step boundary of a
/// phase at which the KV cache fits.
#[derive(Clone, Debug)]
pub struct Phases {
    phases: Vec<Phase>,
    gate: Gate,
}

impl Phases {
    /// `phases` in order of time; the first layout also applies before the first phase.
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
        self.gate.pass(unit, to, "a phase begins")
    }
}

/// Prevents switches while one is under way, and switches to a layout that is too full.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    guard: Guard,
    switching: Option<Layout>,
}

impl Gate {
    pub(crate) fn new(guard: Guard) -> Self {
        Gate { guard, switching: None }
    }

    /// Records the end of a switch.
    pub(crate) fn observe(&mut self, event: &Event) {
        if matches!(event, Event::Switched { .. } | Event::Failed { .. }) {
            self.switching = None;
        }
    }

    /// Must be called at every decision; an error while a switch is under way.
    pub(crate) fn update(&mut self, unit: &UnitView<'_>) -> Result<(), Stay> {
        self.guard.update(unit.promised_kv_tokens);
        self.switching.map_or(Ok(()), |to| Err(Stay::Switching { to }))
    }

    /// Switches if the cache fits.
    pub(crate) fn pass(&mut self, unit: &UnitView<'_>, to: Layout, rule: &'static str) -> Decision {
        if let Err(no_room) = self.guard.check(to, unit.promised_kv_tokens) {
            return Decision::Stay(Stay::NoRoom(no_room));
        }
        self.switching = Some(to);
        Decision::Switch(Switch { to, cause: Cause::Rule(rule) })
    }
}
