//! A policy that keeps the unit's layout fixed.

use super::{Decision, Event, Layout, Stay, SwitchPolicy, UnitView};

/// A policy that never switches.
#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    /// The unit's layout.
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
