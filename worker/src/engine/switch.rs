//! A rank's part in a switch of the unit's layout: it checks what is asked, begins no more steps, moves its experts with the others, and
//! goes on.
//!
//! With attention dp a rank that holds begins no step of its own but joins those of others, so that no rank waits for it. Once all hold
//! no step is left. Rank 0 then says so to every rank (`Quiet`) before any of them moves: whatever a peer begins from then on is the move,
//! and the rank waits for its own order to take part. With attention tp the order to move is rank 0's, told like all its orders between the same two steps of all
//! ranks, and there is nothing to hold.

use serde::{Deserialize, Serialize};

use super::run::Engine;
use crate::control::message::{FromRank, ToRank};
use crate::ep::{ExpertSpread, UnitError};
use crate::memory::available_bytes;
use crate::model::SwitchOutcome;

/// What rank 0 asks of a rank, in this order; `Abort` at any time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum SwitchOrder {
    /// Check that it could be done, and remember it.
    Prepare(Box<ExpertSpread>),
    /// Begin no step until the end of the switch.
    Hold,
    /// All ranks hold: join no step either.
    Quiet,
    /// Move the experts, together with all ranks.
    Move,
    /// Forget it. While experts move: take them back.
    Abort,
}

/// How a rank answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum SwitchReport {
    /// To `Prepare`.
    Prepared,
    /// To `Prepare`: it cannot be done.
    Refused {
        /// Why.
        reason: String,
    },
    /// To `Hold`.
    Held,
    /// To `Quiet`.
    Quiet,
    /// To `Move`, by rank 0 alone: it is about to do this MoE layer.
    Layer(u16),
    /// To `Move`, when it is over.
    Ended(SwitchOutcome),
}

/// What was asked and has not ended.
#[derive(Debug)]
pub(super) struct Prepared {
    ticket: u64,
    to: ExpertSpread,
    steps: Steps,
}

/// Which steps a rank takes part in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Steps {
    All,
    /// Those that others begin.
    Joined,
    None,
}

impl Engine {
    /// Whether this rank begins no steps for now.
    pub(super) fn holds(&self) -> bool {
        self.switch.as_ref().is_some_and(|prepared| prepared.steps != Steps::All)
    }

    /// Whether it takes part in no steps at all, so that only an order can make it go on.
    pub(super) fn is_quiet(&self) -> bool {
        self.switch.as_ref().is_some_and(|prepared| prepared.steps == Steps::None)
    }

    /// Does what rank 0 asks of every rank by itself.
    pub(super) fn take_switch_order(&mut self, ticket: u64, order: SwitchOrder) -> Result<(), UnitError> {
        match order {
            SwitchOrder::Prepare(to) => {
                let report = match self.refusal(&to) {
                    Some(reason) => SwitchReport::Refused { reason },
                    None => {
                        self.switch = Some(Prepared { ticket, to: *to, steps: Steps::All });
                        SwitchReport::Prepared
                    }
                };
                self.report(ticket, report);
            }
            SwitchOrder::Hold => self.restrict(ticket, Steps::Joined, SwitchReport::Held),
            SwitchOrder::Quiet => self.restrict(ticket, Steps::None, SwitchReport::Quiet),
            SwitchOrder::Move => self.switch_now(ticket)?,
            SwitchOrder::Abort => {
                self.switch.take_if(|prepared| prepared.ticket == ticket);
            }
        }
        Ok(())
    }

    fn restrict(&mut self, ticket: u64, steps: Steps, report: SwitchReport) {
        let splits = self.model.splits_attention();
        let Some(prepared) = self.switch.as_mut().filter(|prepared| prepared.ticket == ticket) else { return };
        // With attention tp rank 0's order comes with a step's sync.
        prepared.steps = if splits { Steps::All } else { steps };
        self.report(ticket, report);
    }

    /// Why this rank cannot take part, if it cannot.
    fn refusal(&self, to: &ExpertSpread) -> Option<String> {
        if let Err(error) = self.model.check_spread(to, &self.ep) {
            return Some(error.to_string());
        }
        let needed = self.model.switch_bytes(to, &self.ep) as u64;
        let available = available_bytes().filter(|available| *available < needed)?;
        Some(format!("it needs {needed} bytes more while the experts move, and {available} are available"))
    }

    /// Moves the experts. All ranks come here between the same two steps.
    pub(super) fn switch_now(&mut self, ticket: u64) -> Result<(), UnitError> {
        let Some(Prepared { to, .. }) = self.switch.take_if(|prepared| prepared.ticket == ticket) else {
            return Err(UnitError::protocol(0, "it ordered a switch that it had not prepared"));
        };
        self.flush();
        let leads = self.ep.rank().get() == 0;
        let Self { model, ep, inbox, emit, .. } = self;
        let aborted = ToRank::Switch { ticket, order: SwitchOrder::Abort };
        let mut objection = |layer: semmoe_tables::LayerIdx| {
            if leads {
                emit(FromRank::Switch { ticket, report: SwitchReport::Layer(layer.index() as u16) });
            }
            inbox.holds(&aborted).then(|| "the switch was aborted".to_owned())
        };
        let outcome = model.switch_experts(&to, ep, &mut objection)?;
        self.report(ticket, SwitchReport::Ended(outcome));
        Ok(())
    }

    fn report(&mut self, ticket: u64, report: SwitchReport) {
        (self.emit)(FromRank::Switch { ticket, report });
    }
}
