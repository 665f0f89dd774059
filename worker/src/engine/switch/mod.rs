//! A rank's part in a layout switch: it checks the request, stops starting steps, moves experts, keys and values with
//! the other ranks, and resumes.
//!
//! Under attention dp, a holding rank starts no steps but joins the steps of others, so that no rank waits for it. Once
//! all ranks hold, no step is in progress. Rank 0 then notifies every rank (`Quiet`) before any of them moves: from
//! then on, anything that a peer starts is the move, and the rank waits for its own command to take part. Under
//! attention tp, the command to move arrives from rank 0 between the same two steps on all ranks, like all its
//! commands, so there is nothing to hold.

pub(super) mod attention;
mod order;

use semmoe_tables::Attention;

pub(crate) use order::{SwitchOrder, SwitchReport, SwitchTo};

use self::attention::PreparedAttention;
use super::inbox::Inbox;
use super::run::Engine;
use crate::control::message::{FromRank, ToRank};
use crate::ep::{ExpertPlacement, UnitError};
use crate::memory::{available_bytes, shortage};
use crate::model::{AttentionShape, ModelError, SwitchFault, SwitchOutcome};

/// A prepared switch that has not ended.
#[derive(Debug)]
pub(super) struct Prepared {
    ticket: u64,
    to: SwitchTo,
    steps: Steps,
    /// Whether to drop the switch, or to roll it back if the command to move has already been sent.
    aborted: bool,
}

/// The cause reported after an abort.
pub(super) const ABORTED: &str = "the switch was aborted";

/// The steps that a rank takes part in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Steps {
    All,
    /// Only steps that other ranks start.
    Joined,
    None,
}

impl Engine {
    /// Whether this rank currently starts no steps.
    pub(super) fn holds(&self) -> bool {
        self.switch.as_ref().is_some_and(|prepared| prepared.steps != Steps::All)
    }

    /// Whether this rank takes part in no steps, so that only a command can make it resume.
    pub(super) fn is_quiet(&self) -> bool {
        self.switch.as_ref().is_some_and(|prepared| prepared.steps == Steps::None)
    }

    /// Executes a switch command that rank 0 sends directly to every rank.
    pub(super) fn take_switch_order(&mut self, ticket: u64, order: SwitchOrder) -> Result<(), UnitError> {
        match order {
            SwitchOrder::Prepare(to) => {
                let report = match self.refusal(&to) {
                    Some(reason) => SwitchReport::Refused { reason },
                    None => {
                        self.switch = Some(Prepared { ticket, to: *to, steps: Steps::All, aborted: false });
                        SwitchReport::Prepared
                    }
                };
                self.report(ticket, report);
            }
            SwitchOrder::Hold => self.restrict(ticket, Steps::Joined, SwitchReport::Held),
            SwitchOrder::Quiet => self.restrict(ticket, Steps::None, SwitchReport::Quiet),
            SwitchOrder::Move => self.switch_now(ticket)?,
            SwitchOrder::Abort => {
                // Under attention tp, the command to move may have been sent but not yet received.
                if let Some(prepared) = self.switch.as_mut().filter(|prepared| prepared.ticket == ticket) {
                    (prepared.steps, prepared.aborted) = (Steps::All, true);
                }
            }
        }
        Ok(())
    }

    fn restrict(&mut self, ticket: u64, steps: Steps, report: SwitchReport) {
        let attention = self.model.attention();
        let Some(prepared) = self.switch.as_mut().filter(|prepared| prepared.ticket == ticket) else { return };
        // Under attention tp, steps must continue, because the command to move arrives in the sync before a step.
        prepared.steps = if attention == Attention::Tp { Steps::All } else { steps };
        self.report(ticket, report);
    }

    /// Returns the reason that this rank cannot take part; `None` if it can.
    fn refusal(&self, to: &SwitchTo) -> Option<String> {
        if self.ep.attention_group().len() < self.ep.step_ranks().len() {
            return Some("its attention runs in groups of ranks, which cannot switch".to_owned());
        }
        let now = self.model.attention_shape();
        if to.attention != now {
            if !self.model.other_attentions().any(|other| other == to.attention) {
                let AttentionShape { attention, ranks } = to.attention;
                return Some(format!("it has no weights for attention {attention} in groups of {ranks} ranks"));
            }
            let [less, more] = [now.ranks.min(to.attention.ranks), now.ranks.max(to.attention.ranks)];
            if !more.is_multiple_of(less) {
                return Some(format!(
                    "keys and values cannot move between groups of {} and {} ranks, as neither size divides the other: \
                     switch to ep in between",
                    now.ranks, to.attention.ranks
                ));
            }
            let in_groups =
                [self.ep.placement(), &to.placement].into_iter().any(|placement| placement.layout.groups().is_some());
            if to.kv_step_bytes.is_some() && in_groups {
                return Some(
                    "with groups of ranks, keys and values move during the switch: leave kv_step_bytes out".to_owned(),
                );
            }
            if to.kv_step_bytes.is_some() && !self.model.is_on_host() {
                return Some(
                    ModelError::NotOnGpu("keys and values that move after the switch (kv_step_bytes)").to_string(),
                );
            }
            // In a larger group, every rank needs as many pages as this rank uses now.
            let (usage, room) = (self.pool.usage(), self.pages(to.attention) as u64);
            let pages = usage.used + usage.promised;
            if pages > room && to.attention.ranks > now.ranks {
                return Some(format!(
                    "its sequences need {pages} KV cache pages, but under attention tp it has only {room}"
                ));
            }
        }
        if to.placement == *self.ep.placement() {
            return None;
        }
        if let Err(error) = self.model.check_switch(&to.placement, &self.ep) {
            return Some(error.to_string());
        }
        shortage(self.model.switch_bytes(&to.placement, &self.ep) as u64, available_bytes())
    }

    /// Moves to the new layout: first keys and values, into unused pages, then experts; then both take effect. All
    /// ranks call this between the same two steps.
    pub(super) fn switch_now(&mut self, ticket: u64) -> Result<(), UnitError> {
        let Some(Prepared { to, aborted, .. }) = self.switch.take_if(|prepared| prepared.ticket == ticket) else {
            return Err(UnitError::protocol(0, "it ordered a switch without preparing it"));
        };
        self.flush();
        let abort = ToRank::Switch { ticket, order: SwitchOrder::Abort };
        let objection = |inbox: &Inbox| (aborted || inbox.holds(&abort)).then(|| ABORTED.to_owned());
        let switches = to.attention != self.model.attention_shape();
        let prepared = switches.then(|| self.prepare_attention(to.attention, to.kv_step_bytes, &objection));
        let outcome = match prepared.transpose() {
            Err(SwitchFault::Unit(error)) => return Err(error),
            Err(SwitchFault::Refused(refusal)) => SwitchOutcome::RolledBack { cause: refusal.to_string() },
            Ok(prepared) => {
                let outcome = self.move_experts(ticket, &to.placement, &objection)?;
                if let (SwitchOutcome::Committed, Some(prepared)) = (&outcome, prepared) {
                    self.finish_attention(ticket, prepared);
                }
                outcome
            }
        };
        self.report(ticket, SwitchReport::Ended(outcome));
        Ok(())
    }

    fn move_experts(
        &mut self,
        ticket: u64,
        to: &ExpertPlacement,
        objection: &dyn Fn(&Inbox) -> Option<String>,
    ) -> Result<SwitchOutcome, UnitError> {
        if to == self.ep.placement() {
            return Ok(SwitchOutcome::Committed);
        }
        let leads = self.ep.rank().get() == 0;
        let Self { model, ep, inbox, emit, .. } = self;
        let mut objects = |layer: semmoe_tables::LayerIdx| {
            if leads {
                emit(FromRank::Switch { ticket, report: SwitchReport::Layer(layer.index() as u16) });
            }
            objection(inbox)
        };
        let placed = ep.placement().replicas.clone();
        let outcome = model.switch_experts(to, ep, &mut objects)?;
        if outcome == SwitchOutcome::Committed && placed != to.replicas {
            // T is valid only for the previous placement.
            self.affinity = None;
        }
        Ok(outcome)
    }

    fn finish_attention(&mut self, ticket: u64, mut prepared: PreparedAttention) {
        if prepared.leads {
            self.report(ticket, SwitchReport::Homes(std::mem::take(&mut prepared.kv.groups)));
        }
        self.commit_attention(prepared);
        tracing::info!(rank = %self.ep.rank(), attention = %self.model.attention(), running = self.running.len(), "attention has changed");
    }

    fn report(&mut self, ticket: u64, report: SwitchReport) {
        (self.emit)(FromRank::Switch { ticket, report });
    }
}
