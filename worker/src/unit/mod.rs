//! The whole unit as rank 0 sees it: its ranks, its sequences and its health.

mod deferred;
mod hub;
mod layout;
mod running;
mod shutdown;
mod switch;

pub(crate) use hub::Lost;
pub(crate) use hub::{Port, Timeouts, Unit, UnitStatus};
pub(crate) use layout::{LayoutName, UnitLayout};
pub(crate) use running::{Running, SubmitError};
pub use shutdown::Shutdown;
pub(crate) use switch::{SwitchError, SwitchHistory, SwitchKind};
