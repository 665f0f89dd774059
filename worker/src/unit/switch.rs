//! A layout switch of the unit, driven by rank 0.
//!
//! ```text
//! stable -> preparing -> prepared -> holding -> moving -> stable, one epoch later
//!               \____________\__________\__________\____-> stable, as before
//! ```
//!
//! Every rank checks the switch before anything changes (`preparing`). A prepared switch waits for its commit for a
//! limited time. `holding` lets running steps finish; new requests wait on their ranks. In `moving`, the ranks agree on
//! every layer and all end in the same layout, new or old. Losing a rank during a switch fails the unit, as at any
//! other time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use semmoe_engines::switch::{SwitchState, SwitchStatus};
use semmoe_tables::RankId;
use tokio::sync::mpsc;
use tokio::time::{Instant as Deadline, timeout_at};

use super::deferred::Deferred;
use super::hub::{State, Unit};
use super::layout::{LayoutName, UnitLayout};
use super::running::SubmitError;
use crate::control::message::ToRank;
use crate::engine::{SwitchOrder, SwitchReport, SwitchTo};
use crate::model::SwitchOutcome;

/// Time limit for the ranks to check a switch.
const PREPARE_LIMIT: Duration = Duration::from_secs(10);

/// A switch in progress.
#[derive(Debug)]
pub(super) struct Switch {
    ticket: u64,
    to: Arc<UnitLayout>,
    phase: SwitchState,
    /// The MoE layer being moved.
    layer: Option<u16>,
    reports: mpsc::UnboundedSender<RankReport>,
    /// Commands and events deferred while ranks move.
    deferred: Deferred,
    /// Used by the phase that waits for reports.
    receiver: Option<Reports>,
}

/// A report and the rank that sent it.
type RankReport = (RankId, SwitchReport);
type Reports = mpsc::UnboundedReceiver<RankReport>;

/// How the phase waiting for a report interprets it.
enum Answer {
    Accepts,
    Refuses {
        reason: String,
    },
    /// A progress report; the answer has not arrived yet.
    Pending,
}

/// Outcomes of past switches, and the duration of the last one.
#[derive(Clone, Debug, Default)]
pub(crate) struct SwitchHistory {
    /// Number of switches by source, target and outcome.
    pub(crate) counts: BTreeMap<SwitchKind, u64>,
    /// Duration of the last committed switch, from holding to the end.
    pub(crate) last: Option<Duration>,
}

/// The key by which switches are counted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct SwitchKind {
    pub(crate) from: LayoutName,
    pub(crate) to: LayoutName,
    pub(crate) end: SwitchEnd,
}

/// How a switch ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum SwitchEnd {
    Committed,
    RolledBack,
    Refused,
    Aborted,
}

impl SwitchEnd {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Committed => "committed",
            Self::RolledBack => "rolled_back",
            Self::Refused => "refused",
            Self::Aborted => "aborted",
        }
    }
}

/// The reason that a switch did not take place; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SwitchError {
    #[error("a switch is in progress: it is {}", state_name(*.0))]
    Busy(SwitchState),
    #[error("if_epoch is {expected}, but the unit is at epoch {found}")]
    Epoch { expected: u64, found: u64 },
    #[error("no switch is prepared")]
    NotPrepared,
    #[error("rank {rank} refuses: {reason}")]
    Refused { rank: RankId, reason: String },
    #[error("rank {rank} did not answer within {} seconds while the switch was {}", .limit.as_secs(), state_name(*.phase))]
    Late { rank: RankId, phase: SwitchState, limit: Duration },
    #[error("the switch was aborted")]
    Aborted,
    #[error("nothing has changed: {cause}")]
    RolledBack { cause: String },
    #[error(transparent)]
    Unit(SubmitError),
}

fn state_name(state: SwitchState) -> &'static str {
    match state {
        SwitchState::Stable => "over",
        SwitchState::Preparing => "being prepared",
        SwitchState::Prepared => "prepared",
        SwitchState::Holding => "waiting for steps to end",
        SwitchState::Moving => "moving",
    }
}

/// Ends the switch on drop, unless another phase follows.
struct Driver<'a> {
    unit: &'a Unit,
    ticket: u64,
    end: Option<SwitchEnd>,
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        if let Some(end) = self.end {
            self.unit.end_switch(self.ticket, end);
        }
    }
}

impl Unit {
    /// The layout in force.
    pub(crate) fn layout(&self) -> Arc<UnitLayout> {
        Arc::clone(&self.state().layout)
    }

    pub(crate) fn switch_history(&self) -> SwitchHistory {
        self.state().switches.clone()
    }

    pub(crate) fn switch_status(&self) -> SwitchStatus {
        let state = self.state();
        let switch = state.switch.as_ref();
        SwitchStatus {
            state: switch.map_or(SwitchState::Stable, |switch| switch.phase),
            epoch: state.layout.epoch,
            layout: state.layout.name().to_string(),
            placement_digest: state.layout.placement_digest.clone(),
            to: switch.map(|switch| switch.to.name().to_string()),
            layer: switch.and_then(|switch| switch.layer),
            last_seconds: state.switches.last.map(|last| last.as_secs_f64()),
        }
    }

    /// Makes every rank check a switch to `to`, which gets the next epoch. The prepared switch then waits for
    /// [`Unit::commit_switch`]. See [`SwitchTo`] for `kv_step_bytes`.
    ///
    /// # Errors
    /// See [`SwitchError`].
    pub(crate) async fn prepare_switch(
        &self,
        to: UnitLayout,
        kv_step_bytes: Option<u64>,
        if_epoch: Option<u64>,
    ) -> Result<(), SwitchError> {
        let (ticket, mut receiver) = self.begin_switch(to, kv_step_bytes, if_epoch)?;
        let mut driver = Driver { unit: self, ticket, end: Some(SwitchEnd::Refused) };
        self.collect(&mut receiver, SwitchState::Preparing, PREPARE_LIMIT, |report| match report {
            SwitchReport::Prepared => Answer::Accepts,
            SwitchReport::Refused { reason } => Answer::Refuses { reason },
            _ => Answer::Pending,
        })
        .await?;
        {
            let mut state = self.state();
            let switch = state.switch_of(ticket)?;
            (switch.phase, switch.receiver) = (SwitchState::Prepared, Some(receiver));
        }
        driver.end = None;
        let unit = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(unit.timeouts.prepared).await;
            let waits = unit.state().switch_of(ticket).is_ok_and(|switch| switch.phase == SwitchState::Prepared);
            if waits {
                tracing::warn!("a prepared switch was not committed in time");
                unit.end_switch(ticket, SwitchEnd::Aborted);
            }
        });
        Ok(())
    }

    /// Executes the prepared switch; on return, all ranks are in the new layout, or all are in the old one.
    ///
    /// # Errors
    /// See [`SwitchError`].
    pub(crate) async fn commit_switch(&self, if_epoch: Option<u64>) -> Result<Arc<UnitLayout>, SwitchError> {
        let (ticket, mut receiver) = {
            let mut state = self.state();
            // Ranks that have finished their requests may have exited.
            if state.draining {
                return Err(SwitchError::Unit(SubmitError::Stopping));
            }
            state.check_epoch(if_epoch)?;
            let switch = state.switch.as_mut().ok_or(SwitchError::NotPrepared)?;
            let (SwitchState::Prepared, Some(receiver)) = (switch.phase, switch.receiver.take()) else {
                return Err(SwitchError::Busy(switch.phase));
            };
            switch.phase = SwitchState::Holding;
            (switch.ticket, receiver)
        };
        let began = Instant::now();
        let mut driver = Driver { unit: self, ticket, end: Some(SwitchEnd::Aborted) };
        for (order, answer) in [(SwitchOrder::Hold, SwitchReport::Held), (SwitchOrder::Quiet, SwitchReport::Quiet)] {
            self.broadcast(&ToRank::Switch { ticket, order });
            let answered = |report| if report == answer { Answer::Accepts } else { Answer::Pending };
            self.collect(&mut receiver, SwitchState::Holding, self.timeouts.step, answered).await?;
        }
        {
            let mut state = self.state();
            state.switch_of(ticket)?.phase = SwitchState::Moving;
            // Under attention tp, the first rank of a group forwards the command to the others, so that all move
            // between the same two steps.
            let order = || ToRank::Switch { ticket, order: SwitchOrder::Move };
            let leaders = (0..state.replicas()).map(|replica| state.leader(RankId::new(replica)));
            leaders.for_each(|rank| state.send(rank, order()));
        }
        let mut outcome = None;
        // No time limit is needed: a lost or late rank fails the unit, which ends this wait.
        for _ in 0..self.world {
            outcome = Some(loop {
                if let SwitchReport::Ended(ended) = receiver.recv().await.ok_or_else(|| self.gone())?.1 {
                    break ended;
                }
            });
        }
        match outcome {
            Some(SwitchOutcome::RolledBack { cause }) => {
                driver.end = Some(SwitchEnd::RolledBack);
                Err(SwitchError::RolledBack { cause })
            }
            Some(SwitchOutcome::Committed) | None => {
                driver.end = Some(SwitchEnd::Committed);
                self.state().switches.last = Some(began.elapsed());
                drop(driver);
                Ok(self.layout())
            }
        }
    }

    /// Ends a switch that has not moved anything yet; rolls back a switch that is moving.
    ///
    /// # Errors
    /// No switch is in progress.
    pub(crate) fn abort_switch(&self) -> Result<(), SwitchError> {
        let (ticket, phase) = {
            let state = self.state();
            let switch = state.switch.as_ref().ok_or(SwitchError::NotPrepared)?;
            (switch.ticket, switch.phase)
        };
        match phase {
            SwitchState::Moving => self.broadcast(&ToRank::Switch { ticket, order: SwitchOrder::Abort }),
            _ => self.end_switch(ticket, SwitchEnd::Aborted),
        }
        Ok(())
    }

    fn begin_switch(
        &self,
        to: UnitLayout,
        kv_step_bytes: Option<u64>,
        if_epoch: Option<u64>,
    ) -> Result<(u64, Reports), SwitchError> {
        let mut state = self.state();
        if let Some(lost) = self.lost() {
            return Err(SwitchError::Unit(SubmitError::Dead(lost)));
        }
        if state.draining || state.ports.is_empty() {
            return Err(SwitchError::Unit(SubmitError::Stopping));
        }
        if let Some(switch) = &state.switch {
            return Err(SwitchError::Busy(switch.phase));
        }
        state.check_epoch(if_epoch)?;
        let (reports, receiver) = mpsc::unbounded_channel();
        let ticket = state.take_id();
        let attention = to.attention_shape(self.world);
        let prepare = Box::new(SwitchTo { placement: to.placement.clone(), attention, kv_step_bytes });
        let to = Arc::new(UnitLayout { epoch: state.layout.epoch + 1, ..to });
        let phase = SwitchState::Preparing;
        state.switch =
            Some(Switch { ticket, to, phase, layer: None, reports, deferred: Deferred::default(), receiver: None });
        drop(state);
        self.broadcast(&ToRank::Switch { ticket, order: SwitchOrder::Prepare(prepare) });
        Ok((ticket, receiver))
    }

    /// Waits for one reply from each rank.
    async fn collect(
        &self,
        receiver: &mut Reports,
        phase: SwitchState,
        limit: Duration,
        answer: impl Fn(SwitchReport) -> Answer,
    ) -> Result<(), SwitchError> {
        let deadline = Deadline::now() + limit;
        let mut missing: Vec<RankId> = (0..self.world).map(RankId::new).collect();
        while let Some(&late) = missing.first() {
            let next = timeout_at(deadline, receiver.recv()).await;
            let (rank, report) =
                next.map_err(|_| SwitchError::Late { rank: late, phase, limit })?.ok_or_else(|| self.gone())?;
            match answer(report) {
                Answer::Accepts => missing.retain(|other| *other != rank),
                Answer::Refuses { reason } => return Err(SwitchError::Refused { rank, reason }),
                Answer::Pending => {}
            }
        }
        Ok(())
    }

    /// Returns the reason that no more reports arrive.
    fn gone(&self) -> SwitchError {
        self.lost().map_or(SwitchError::Aborted, |lost| SwitchError::Unit(SubmitError::Dead(lost)))
    }

    fn end_switch(&self, ticket: u64, end: SwitchEnd) {
        let mut state = self.state();
        let Some(switch) = state.switch.take_if(|switch| switch.ticket == ticket) else { return };
        let kind = SwitchKind { from: state.layout.name(), to: switch.to.name(), end };
        *state.switches.counts.entry(kind).or_default() += 1;
        match end {
            SwitchEnd::Committed => state.layout = switch.to,
            _ => state.broadcast(&ToRank::Switch { ticket, order: SwitchOrder::Abort }),
        }
        self.release(state, switch.deferred);
    }

    /// Processes a rank's report about a switch.
    pub(super) fn switch_report(&self, rank: RankId, ticket: u64, report: SwitchReport) {
        let mut state = self.state();
        let Ok(switch) = state.switch_of(ticket) else { return };
        match &report {
            SwitchReport::Layer(layer) => switch.layer = Some(*layer),
            SwitchReport::Homes(groups) => {
                switch.deferred.replicas.extend(groups.iter().map(|&(sequence, rank)| (sequence, RankId::new(rank))));
            }
            SwitchReport::Ended(_) => {
                switch.deferred.ended.insert(rank);
            }
            _ => {}
        }
        // The driver may have been dropped.
        let _ = switch.reports.send((rank, report));
    }
}

impl Switch {
    /// Returns the deferred commands and events, once ranks may be in different layouts.
    pub(super) fn deferred(&mut self) -> Option<&mut Deferred> {
        (self.phase == SwitchState::Moving).then_some(&mut self.deferred)
    }
}

impl State {
    fn switch_of(&mut self, ticket: u64) -> Result<&mut Switch, SwitchError> {
        self.switch.as_mut().filter(|switch| switch.ticket == ticket).ok_or(SwitchError::Aborted)
    }

    fn check_epoch(&self, if_epoch: Option<u64>) -> Result<(), SwitchError> {
        match if_epoch {
            Some(expected) if expected != self.layout.epoch => {
                Err(SwitchError::Epoch { expected, found: self.layout.epoch })
            }
            _ => Ok(()),
        }
    }
}
