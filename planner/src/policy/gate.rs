//! One switch at a time, and only to a layout with room.

use super::{Cause, Decision, Event, Guard, Layout, Stay, Switch, UnitView};

/// The part of a policy that keeps it from switching while a switch is under way, or to a layout that is too full.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    guard: Guard,
    switching: Option<Layout>,
}

impl Gate {
    pub(super) fn new(guard: Guard) -> Self {
        Gate { guard, switching: None }
    }

    /// Notes the end of a switch.
    pub(super) fn observe(&mut self, event: &Event) {
        if matches!(event, Event::Switched { .. } | Event::Failed { .. }) {
            self.switching = None;
        }
    }

    /// To be called at every decision; an error while a switch is under way.
    pub(super) fn update(&mut self, unit: &UnitView<'_>) -> Result<(), Stay> {
        self.guard.update(unit.promised_kv_tokens);
        self.switching.map_or(Ok(()), |to| Err(Stay::Switching { to }))
    }

    /// Switches, if there is room.
    pub(super) fn pass(&mut self, unit: &UnitView<'_>, to: Layout, cause: Cause) -> Decision {
        if let Err(no_room) = self.guard.check(to, unit.promised_kv_tokens) {
            return Decision::Stay(Stay::NoRoom(no_room));
        }
        self.switching = Some(to);
        Decision::Switch(Switch { to, cause })
    }
}
