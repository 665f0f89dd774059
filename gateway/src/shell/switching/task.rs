//! One task per switchable backend: reads it, consults the policy, acts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use semmoe_engines::Engine;
use semmoe_engines::SharedError;
use semmoe_engines::http::{AnswerLimits, HttpError};
use semmoe_engines::sglang::{self, Loads};
use semmoe_engines::switch::{SwitchState, SwitchStatus};
use semmoe_planner::policy::Layout;
use tokio_util::sync::CancellationToken;

use super::hook::Hook;
use super::reading::{Load, Reading};
use super::record::UnitName;
use super::unit::{Unit, Verdict};
use super::{Move, Outcome, webhook};
use crate::backends::{Backend, Watched, health};
use crate::config::{SwitchConfig, SwitchMode, Webhook};
use crate::shell::control::Control;

/// How often the configuration is checked while there is nothing to do.
const IDLE: Duration = Duration::from_secs(1);
/// Maximum size of a worker's metrics, which have a few lines per layer and rank.
const METRICS_BYTES: usize = 32 << 20;

/// Watches a backend with a switch hook, or one that a webhook switches, until `stop` is cancelled.
pub(crate) async fn watch(control: Arc<Control>, Watched { backend, stop }: Watched) {
    let mut task = Task { control: &control, backend: &backend, stop: &stop, steered: None };
    while !stop.is_cancelled() {
        let config = control.backends.config();
        let rules = &config.switch;
        // A gateway that is shutting down does not switch units.
        let off = rules.mode == SwitchMode::Off || control.data.is_draining();
        let by = match (backend.engine, &rules.webhook, backend.config.layout) {
            _ if off => None,
            (Engine::Semmoe, ..) => Some(By::Worker),
            (_, Some(hook), Some(start)) => Some(By::Webhook { hook, start }),
            _ => None,
        };
        let pause = match &by {
            Some(by) => {
                task.tick(rules, by).await;
                rules.interval
            }
            None => {
                task.steered = None;
                if off {
                    backend.flow.line.keep(false);
                }
                // Another task manages the pools of this name.
                control.switches.forget(&backend.name);
                IDLE
            }
        };
        stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }
    backend.flow.line.keep(false);
    control.switches.forget(&backend.name);
}

/// The actuator that executes switches.
enum By<'a> {
    Worker,
    Webhook { hook: &'a Webhook, start: Layout },
}

impl By<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Webhook { .. } => "webhook",
        }
    }
}

/// A policy with the rules it was created under, and the last reading.
struct Steered {
    rules: SwitchConfig,
    unit: Unit,
    before: Option<Reading>,
    /// Number of requests and prompt tokens that this gateway has sent to the backend.
    arrived: (u64, u64),
    /// The layout of an engine that is switched by a webhook.
    layout: Option<Layout>,
}

/// The result of polling a unit once.
struct Seen {
    layout: Layout,
    load: Load,
}

struct Task<'a> {
    control: &'a Arc<Control>,
    backend: &'a Arc<Backend>,
    stop: &'a CancellationToken,
    steered: Option<Steered>,
}

impl Task<'_> {
    async fn tick(&mut self, rules: &SwitchConfig, by: &By<'_>) {
        if self.steered.as_ref().is_none_or(|steered| steered.rules != *rules) {
            // An engine's layout does not depend on the rules.
            let layout = self.steered.take().and_then(|steered| steered.layout);
            let arrived = self.backend.flow.peek();
            let arrived = (arrived.arrived, arrived.arrived_tokens);
            self.steered =
                Unit::new(rules).map(|unit| Steered { rules: rules.clone(), unit, before: None, arrived, layout });
        }
        self.backend.flow.line.keep(rules.has_targets());
        let unit = UnitName { name: &self.backend.name, by: by.name() };
        let (control, stop, backend) = (self.control, self.stop, self.backend);
        let Some(steered) = &mut self.steered else { return };
        let seen = tokio::select! {
            seen = steered.observe(control, backend, by) => seen,
            () = stop.cancelled() => return,
        };
        let Seen { layout, load } = match seen {
            Ok(seen) => seen,
            Err(error) => {
                let verdict = Verdict { to: None, gain: None, reason: error.to_string() };
                return control.switches.observed(unit, None, 0, &verdict);
            }
        };
        let heads = backend.flow.line.heads(Instant::now(), control.backends.config().queue.priority_seconds);
        let verdict = steered.unit.decide(layout, &load, &heads);
        let in_flight = u64::from(load.running) + u64::from(load.waiting);
        control.switches.observed(unit, Some(layout), in_flight, &verdict);
        let Some(to) = verdict.to else { return };
        let outcome = match rules.mode {
            SwitchMode::Drive => {
                control.switches.begins(unit, to);
                Some(self.act(rules, by, Move { from: layout, to }).await)
            }
            SwitchMode::Advise | SwitchMode::Off => None,
        };
        let Some(steered) = &mut self.steered else { return };
        steered.unit.ended(to, outcome.as_ref());
        if matches!(outcome, Some(Outcome::Committed { .. })) {
            steered.layout = Some(to);
        }
        control.switches.ended(unit, to, &verdict, outcome.as_ref());
    }

    async fn act(&self, rules: &SwitchConfig, by: &By<'_>, requested: Move) -> Outcome {
        match by {
            By::Worker => {
                let outcome = Hook { backend: self.backend, rules }.switch(requested, self.stop).await;
                // The backend's rank count may have changed.
                if !matches!(outcome, Outcome::Refused { .. } | Outcome::Stopped) {
                    let limits = self.control.backends.patient_limits();
                    tokio::select! {
                        _ = health::probe_again(&self.control.backends, self.backend, &limits) => {}
                        () = self.stop.cancelled() => {}
                    }
                }
                outcome
            }
            By::Webhook { hook, .. } => webhook::switch(hook, rules, &self.backend.name, requested, self.stop).await,
        }
    }
}

impl Steered {
    /// Reads the backend and feeds the policy, or returns why that is impossible.
    async fn observe(&mut self, control: &Control, backend: &Arc<Backend>, by: &By<'_>) -> Result<Seen, SharedError> {
        if !backend.health().is_healthy() {
            self.before = None;
            return Err("the backend is not healthy".into());
        }
        let flow = backend.flow.peek();
        let sent = (flow.arrived - self.arrived.0, flow.arrived_tokens - self.arrived.1);
        self.arrived = (flow.arrived, flow.arrived_tokens);
        match by {
            By::Worker => self.query_worker(control, backend, sent.0).await,
            By::Webhook { start, .. } => {
                self.unit.arrived(sent.0, sent.1);
                let load = Load { running: in_flight(control, backend), ..Load::default() };
                Ok(Seen { layout: *self.layout.get_or_insert(*start), load })
            }
        }
    }

    async fn query_worker(
        &mut self,
        control: &Control,
        backend: &Arc<Backend>,
        sent: u64,
    ) -> Result<Seen, SharedError> {
        let (status, reading) = match read(control, backend, &self.rules).await {
            Ok((status, metrics, loads)) => (status, Reading::parse(&metrics, &loads)?),
            Err(error) => {
                self.before = None;
                // Omit the backend's address.
                return Err(error.reason().into());
            }
        };
        let load = reading.load;
        let interval = self.before.as_ref().map(|before| reading.since(before));
        self.before = Some(reading);
        if let Some(interval) = interval {
            self.unit.arrived(sent, interval.arrived_tokens);
            let steps = interval.steps.as_ref().and_then(|steps| Some((self.rules.layout(&steps.layout)?, steps)));
            if let Some((layout, steps)) = steps {
                self.unit.stepped(layout, steps);
            }
        }
        let Some(layout) = self.rules.layout(&status.layout) else {
            let (found, names) = (&status.layout, &self.rules.names);
            return Err(format!("it runs layout '{found}', which is neither '{}' nor '{}'", names.tp, names.ep).into());
        };
        if status.state != SwitchState::Stable {
            return Err("a switch is in progress".into());
        }
        Ok(Seen { layout, load })
    }
}

async fn read(
    control: &Control,
    backend: &Arc<Backend>,
    rules: &SwitchConfig,
) -> Result<(SwitchStatus, String, Loads), HttpError> {
    let (hook, url) = (Hook { backend, rules }, backend.config.first_url());
    let limits = AnswerLimits { max_bytes: METRICS_BYTES, ..control.backends.patient_limits() };
    let metrics = backend.client.get_text(url, "/metrics", &limits);
    let loads = backend.client.get_json::<Loads>(url, sglang::LOADS, &limits);
    tokio::try_join!(hook.status(), metrics, loads)
}

/// Number of this gateway's requests in flight on a backend.
pub(super) fn in_flight(control: &Control, backend: &Arc<Backend>) -> u32 {
    let snapshot = control.backends.snapshot();
    let Some(at) = snapshot.position(backend) else { return 0 };
    let slots = snapshot.models[at.model].pool.slots().iter().filter(|slot| slot.backend == at.member);
    let pinned: i64 = slots.map(|slot| slot.in_flight()).sum();
    let unpinned = control.backends.metrics.inflight(&backend.name, None).get();
    u32::try_from(pinned + unpinned).unwrap_or(0)
}
