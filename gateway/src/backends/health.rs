//! Probes of backends: one task per backend.
//!
//! A healthy backend is probed only for whether its server answers, because server information costs an engine more.
//! When a backend appears (or returns), the probe covers everything, as the engine and its placement may have changed.
//! Between probes the task sleeps. It wakes early when a request cannot connect, or when the engine closes an idle
//! connection: this detects an engine that dies while idle within a second, without extra probes of the others.
//!
//! A busy engine must not be mistaken for a dead one. A refused connection closes a backend at once, and negative
//! answers close it after `unhealthy_after`. Silence closes it only after `busy`, and any response bytes end that
//! silence. SGLang's server keeps answering while its scheduler hangs, so if no response bytes flow for `busy`, the
//! task also probes its health route, which runs the model and may take as long again. Running streams that fall silent
//! reveal a dead scheduler within seconds, though not with certainty: see [`silence`](crate::backends::silence).

use std::sync::Arc;
use std::time::{Duration, Instant};

use semmoe_engines::Engine;
use semmoe_engines::http::{AnswerLimits, HttpError};
use semmoe_engines::probe::{self, Probe, Target};
use semmoe_engines::rendering::{self, Rendering};
use semmoe_text::built_in_chats;
use serde_json::Value;

use crate::backends::silence::{Change, Silence, SilenceRules};
use crate::backends::verdict::Closed;
use crate::backends::{Aside, Backend, Backends, Model, Watched, parity, pins};

/// Interval between probes of a backend that refuses connections or is starting. It is short because such a backend may
/// return at any moment, and these probes cost next to nothing.
const RETURN: Duration = Duration::from_millis(500);

/// The outcome of one full probe.
pub(crate) enum Verdict {
    /// The backend may receive requests.
    Admitted,
    /// The backend does not answer.
    Silent(HttpError),
    /// The backend answered, but cannot serve.
    Closed(Closed),
}

/// Probes a backend fully, and opens or closes it accordingly.
pub(crate) async fn probe_fully(backends: &Backends, backend: &Arc<Backend>) -> Verdict {
    let mut found = full_probe(backends, backend, &backends.patient_limits()).await;
    if let Ok(found) = &mut found {
        backend.counts.reset();
        found.rendering = ask_for_chats(backends, backend).await;
    }
    admit(backends, backend, found).await
}

/// Probes a backend fully, without acting on the result.
pub(crate) async fn full_probe(
    backends: &Backends,
    backend: &Arc<Backend>,
    limits: &AnswerLimits,
) -> Result<Probe, HttpError> {
    let names = backends.names_asked(backend);
    probe::probe(&backend.client, &Target { names: &names, ..backend.target() }, limits).await
}

/// Probes a backend fully, and re-evaluates it if its answers changed: an engine that restarted between two probes
/// looks healthy throughout, yet may run another placement. Returns whether the backend answered within `limits`.
pub(crate) async fn probe_again(backends: &Backends, backend: &Arc<Backend>, limits: &AnswerLimits) -> bool {
    let (mut found, known) = (full_probe(backends, backend, limits).await, backend.last_probe());
    if let (Ok(found), Some(known)) = (&mut found, &known) {
        found.keep_placement(known);
        found.rendering = known.rendering.clone();
    }
    let answered = found.is_ok();
    let is_another = found.as_ref().is_ok_and(|found| known.as_deref().is_none_or(|known| known != found));
    if let Ok(found) = &mut found
        && (is_another || is_open(backends, backend, found))
    {
        found.rendering = ask_for_chats(backends, backend).await;
    }
    if is_another {
        tracing::info!(backend = backend.name, "the backend's reported properties have changed");
        admit(backends, backend, found).await;
    } else if let (Ok(found), Some(known)) = (found, known)
        && found.rendering != known.rendering
        && let Err(closed) = backends.judge_again(backend, &found)
    {
        backends.mark_unhealthy(backend, closed.to_string());
    }
    answered
}

async fn ask_for_chats(backends: &Backends, backend: &Arc<Backend>) -> Option<Arc<Rendering>> {
    let snapshot = backends.snapshot();
    let (model, _) = snapshot.at(snapshot.position(backend)?);
    chats_of(backends, backend, model).await
}

/// Requests an engine's token ids for the built-in chats; returns `None` if its model's prompts are not read.
pub(crate) async fn chats_of(backends: &Backends, backend: &Backend, model: &Model) -> Option<Arc<Rendering>> {
    model.scoring_text().filter(|text| text.template.is_some())?;
    let bodies: Vec<&Value> = built_in_chats().iter().map(|chat| &chat.body).collect();
    let (url, within) = (backend.config.first_url(), backends.config().health.timeout);
    Some(Arc::new(rendering::ask(&backend.client, backend.engine, url, &bodies, within).await))
}

/// Whether to request the built-in chats' token ids again, although the engine's report is unchanged.
fn is_open(backends: &Backends, backend: &Arc<Backend>, probe: &Probe) -> bool {
    let snapshot = backends.snapshot();
    let Some(at) = snapshot.position(backend) else { return false };
    let (model, member) = snapshot.at(at);
    parity::is_open(probe, &member.fit.parity, model.reader().as_ref())
}

async fn admit(backends: &Backends, backend: &Arc<Backend>, found: Result<Probe, HttpError>) -> Verdict {
    let probe = match found {
        Ok(probe) => probe,
        Err(error) => {
            backends.mark_unhealthy(backend, reason(backend, &error));
            return Verdict::Silent(error);
        }
    };
    pins::prove_at_start(backends, backend, &probe).await;
    match backends.admit(backend, &probe) {
        Ok(()) => Verdict::Admitted,
        Err(closed) => {
            backends.mark_unhealthy(backend, closed.to_string());
            Verdict::Closed(closed)
        }
    }
}

/// Returns why a backend is unhealthy, worded for clients. The full error, with the address, is logged at debug level.
fn reason(backend: &Backend, error: &HttpError) -> String {
    tracing::debug!(backend = backend.name, %error, "a probe failed");
    fault_of(backend, error)
}

/// Returns why a probe failed, worded for clients. Error texts from engines are withheld, except those of this
/// project's worker, which name the lost rank.
pub(crate) fn fault_of(backend: &Backend, error: &HttpError) -> String {
    if backend.engine == Engine::Semmoe { error.reason() } else { error.reason_without_body() }
}

/// Outcomes of a healthy backend's probes since the last successful one.
#[derive(Default)]
struct Failures {
    /// Number of negative answers and broken connections.
    count: u32,
    /// Since when the backend has accepted probes without answering them.
    silent_since: Option<Instant>,
}

/// When to query the identity of a healthy backend again.
struct Identity {
    /// When the backend last reported its identity.
    known_at: Instant,
    /// Whether the backend may have restarted since.
    in_doubt: bool,
}

impl Identity {
    fn known() -> Self {
        Self { known_at: Instant::now(), in_doubt: false }
    }

    /// Queries the identity again if it is due; if the engine is too busy to answer, the next probe retries.
    async fn verify(&mut self, backends: &Backends, backend: &Arc<Backend>) {
        self.in_doubt |= backend.client.take_broken() || self.known_at.elapsed() >= backends.config().health.identity;
        if self.in_doubt && probe_again(backends, backend, &backends.probe_limits()).await {
            *self = Self::known();
        }
    }
}

/// Watches a backend until `stop` is cancelled.
pub(crate) async fn watch(backends: Arc<Backends>, Watched { backend, stop }: Watched) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = watch_server(&backends, &backend) => {}
        () = watch_scheduler(&backends, &backend) => {}
        () = watch_streams(&backends, &backend) => {}
    }
}

async fn watch_server(backends: &Arc<Backends>, backend: &Arc<Backend>) {
    let (mut failures, mut identity) = (Failures::default(), Identity::known());
    // Probe early only once per interval: an engine may keep idle connections only briefly.
    let (mut probed_early, mut away) = (false, false);
    loop {
        let interval = backends.config().health.interval;
        tokio::select! {
            () = tokio::time::sleep(if away { interval.min(RETURN) } else { interval }) => probed_early = false,
            () = backend.client.connection_lost(), if !probed_early => probed_early = true,
            () = backend.suspected() => {}
            () = backend.gate.wait_for_trials() => backends.poll_breaker(backend),
        }
        away = check(backends, backend, &mut failures, &mut identity).await;
    }
}

/// Reports received bytes that belong to no response. If an engine, or a proxy in front of it, sends such bytes, a
/// client could receive another client's response.
fn note_strays(backends: &Backends, backend: &Backend) {
    let strays = backend.client.take_strays();
    if strays > 0 {
        backends.metrics.faults.strays(&backend.name, strays);
        let backend = backend.name.as_str();
        tracing::warn!(backend, strays, "connections closed: the backend sent bytes that belong to no response");
    }
}

/// Probes a backend. Returns whether it is currently gone: it refused the connection, or answered 503.
async fn check(backends: &Backends, backend: &Arc<Backend>, failures: &mut Failures, identity: &mut Identity) -> bool {
    let is_gone = |error: &HttpError| !error.may_have_been_sent() || error.status() == Some(503);
    note_strays(backends, backend);
    if !backend.health().is_healthy() {
        let verdict = probe_fully(backends, backend).await;
        if matches!(verdict, Verdict::Admitted) {
            (*failures, *identity) = (Failures::default(), Identity::known());
            backend.client.take_broken();
        }
        return matches!(verdict, Verdict::Silent(error) if is_gone(&error));
    }
    backend.last_heard();
    let (began, rules) = (Instant::now(), backends.config().health.clone());
    let found = probe::alive(&backend.client, &backend.target(), &backends.probe_limits(), rules.busy).await;
    match found {
        Ok(()) => {
            *failures = Failures::default();
            identity.verify(backends, backend).await;
        }
        // This error reveals nothing about the backend.
        Err(error @ HttpError::Exhausted { .. }) => {
            tracing::warn!(backend = backend.name, %error, "the backend could not be probed");
        }
        Err(error @ HttpError::Timeout { .. }) => {
            let since = *failures.silent_since.get_or_insert(began);
            let heard = backend.last_heard();
            if heard > since {
                failures.silent_since = Some(heard);
            } else if since.elapsed() >= rules.busy {
                backends.mark_unhealthy(backend, reason(backend, &error));
            }
        }
        Err(error) => {
            failures.count += 1;
            let is_final = !error.may_have_been_sent() || probe::is_dead(backend.engine, error.status());
            if is_final || failures.count >= rules.unhealthy_after {
                backends.mark_unhealthy(backend, reason(backend, &error));
                return is_gone(&error);
            }
        }
    }
    false
}

/// Watches the scheduler of an engine whose server answers without it.
async fn watch_scheduler(backends: &Arc<Backends>, backend: &Arc<Backend>) {
    if !probe::health_generates(backend.engine) {
        return std::future::pending().await;
    }
    loop {
        let rules = backends.config().health.clone();
        tokio::time::sleep(rules.interval).await;
        if !backend.health().is_healthy() || backend.last_heard().elapsed() < rules.busy {
            continue;
        }
        let began = Instant::now();
        let limits = AnswerLimits { timeout: rules.busy + rules.timeout, ..backends.probe_limits() };
        match probe::health(&backend.client, &backend.target(), &limits).await {
            Ok(()) => backend.hear(),
            // `watch_server` detects a server that is gone.
            Err(error) if !error.may_have_been_sent() => {}
            Err(error) => {
                if backend.last_heard() < began && backend.health().is_healthy() {
                    let cause = format!("its scheduler does not answer: {}", fault_of(backend, &error));
                    backends.mark_unhealthy(backend, cause);
                }
            }
        }
    }
}

/// The cause shown while a backend's streams are silent and a probe is unanswered.
pub(crate) const SILENT: &str =
    "its streams are silent and its scheduler answers no probes: requests are sent to other backends if any can serve";

/// Watches whether streams make progress, which reveals a dead scheduler sooner than any of the server's routes.
async fn watch_streams(backends: &Arc<Backends>, backend: &Arc<Backend>) {
    if !probe::health_generates(backend.engine) {
        return std::future::pending().await;
    }
    let (mut silence, mut last, mut probe) = (Silence::default(), Instant::now(), None);
    loop {
        let health = backends.config().health.clone();
        let rules = SilenceRules { stall: health.stall, most: health.busy };
        let answered = tokio::select! {
            () = tokio::time::sleep(rules.tick()) => None,
            answered = answer_of(&mut probe) => Some(answered),
        };
        if !backend.health().is_healthy() {
            // A backend that comes back is treated as a new process.
            (silence, probe) = (Silence::default(), None);
            backend.gate.set_aside(Aside::Silent, false);
            continue;
        }
        let elapsed = std::mem::replace(&mut last, Instant::now()).elapsed();
        let change = silence.observe(&rules, elapsed, &backend.flow.read());
        note_silence(backends, backend, change, &silence);
        if answered == Some(true) {
            let recovered = silence.alive();
            note_silence(backends, backend, recovered, &silence);
        }
        // A probe that failed immediately is retried no sooner than the next tick.
        if answered.is_none() && probe.is_none() && silence.wants_answer() {
            probe = Some(Box::pin(scheduler_answers(backends, backend)));
        }
    }
}

/// Waits for the running probe's result and clears the probe; pending forever if none is running.
async fn answer_of<F: Future<Output = bool> + Unpin>(probe: &mut Option<F>) -> bool {
    let Some(running) = probe else { return std::future::pending().await };
    let answered = running.await;
    *probe = None;
    answered
}

async fn scheduler_answers(backends: &Backends, backend: &Backend) -> bool {
    match probe::schedulers(&backend.client, &backend.target(), &backends.patient_limits()).await {
        Ok(()) => true,
        Err(error) => {
            if !error.may_have_been_sent() {
                backend.suspect();
            }
            false
        }
    }
}

fn note_silence(backends: &Backends, backend: &Backend, change: Option<Change>, silence: &Silence) {
    let Some(change) = change else { return };
    let (name, suspected) = (backend.name.as_str(), change == Change::Suspected);
    backend.gate.set_aside(Aside::Silent, suspected);
    backends.metrics.backend_healthy(name, !suspected && backend.health().is_healthy());
    backends.metrics.faults.silence(name, if suspected { "suspected" } else { "recovered" });
    if suspected {
        let (silent_seconds, explained_seconds) = (silence.silent.as_secs_f64(), silence.explained().as_secs_f64());
        let cause = SILENT;
        tracing::warn!(
            backend = name,
            silent_seconds,
            explained_seconds,
            cause,
            "backend receives requests only if no other can serve"
        );
    } else {
        tracing::info!(backend = name, "the scheduler responds after all: the backend receives requests again");
    }
}
