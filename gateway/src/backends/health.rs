//! Probes of backends: one task per backend.
//!
//! A healthy backend is only asked whether its server answers, because server information costs an engine more. When it
//! appears (or returns), the probe covers everything, as it may be another engine with another placement. Between
//! probes the task sleeps. A request that could not connect wakes it, and so does an idle connection that the engine
//! closed: an engine that dies while idle is noticed within a second, at no extra probes for the others.
//!
//! A busy engine must not be mistaken for a dead one. A refused connection closes a backend at once, and negative
//! answers close it after `unhealthy_after`. Silence closes it only after `busy`, and bytes of any answer end that
//! silence. SGLang's server answers on its own while its scheduler hangs, so if no answers flow for `busy` its health
//! route is asked as well, which runs the model and may take as long again. Streams that ran and fell silent reveal a
//! dead scheduler within seconds, though not with certainty: see [`silence`](crate::backends::silence).

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

/// Interval between probes of a backend that refuses connections or is starting: it may return at any moment, and such
/// a probe costs next to nothing.
const RETURN: Duration = Duration::from_millis(500);

/// The outcome of one full probe.
pub(crate) enum Verdict {
    /// It may receive requests.
    Admitted,
    /// It does not answer.
    Silent(HttpError),
    /// It answered, but cannot serve.
    Closed(Closed),
}

/// Asks a backend for everything, and opens or closes it accordingly.
pub(crate) async fn probe_fully(backends: &Backends, backend: &Arc<Backend>) -> Verdict {
    let mut found = full_probe(backends, backend, &backends.patient_limits()).await;
    if let Ok(found) = &mut found {
        backend.counts.reset();
        found.rendering = ask_for_chats(backends, backend).await;
    }
    admit(backends, backend, found).await
}

/// One full probe.
pub(crate) async fn full_probe(
    backends: &Backends,
    backend: &Arc<Backend>,
    limits: &AnswerLimits,
) -> Result<Probe, HttpError> {
    let names = backends.names_asked(backend);
    probe::probe(&backend.client, &Target { names: &names, ..backend.target() }, limits).await
}

/// Asks a backend for everything, and judges it again if its answers changed: an engine that restarted between two
/// probes looks healthy all the time, and may run another placement. Returns whether it answered within `limits`.
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
        tracing::info!(backend = backend.name, "the properties that the backend reports have changed");
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

/// Asks a backend for its token ids of the built-in chats; `None` if its model's prompts are not read.
pub(crate) async fn chats_of(backends: &Backends, backend: &Backend, model: &Model) -> Option<Arc<Rendering>> {
    model.scoring_text().filter(|text| text.template.is_some())?;
    let bodies: Vec<&Value> = built_in_chats().iter().map(|chat| &chat.body).collect();
    let (url, within) = (backend.config.first_url(), backends.config().health.timeout);
    Some(Arc::new(rendering::ask(&backend.client, backend.engine, url, &bodies, within).await))
}

/// Whether to ask for the built-in prompts' token ids again, although the engine reports that it is the same one.
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

/// Why a backend is unhealthy, in words that clients may read; the address is logged at level debug.
fn reason(backend: &Backend, error: &HttpError) -> String {
    tracing::debug!(backend = backend.name, %error, "a probe failed");
    fault_of(backend, error)
}

/// Why a probe failed, in words that clients may read. An engine's own words are withheld, except those of this
/// project's worker, which name the lost rank.
pub(crate) fn fault_of(backend: &Backend, error: &HttpError) -> String {
    if backend.engine == Engine::Semmoe { error.reason() } else { error.reason_without_body() }
}

/// The outcomes of a healthy backend's probes since the last good one.
#[derive(Default)]
struct Failures {
    /// Negative answers, and broken connections.
    count: u32,
    /// Since when it accepts probes and answers none.
    silent_since: Option<Instant>,
}

/// When to query the identity of a healthy backend again.
struct Identity {
    /// When it last reported its identity.
    known_at: Instant,
    /// It may have restarted since.
    in_doubt: bool,
}

impl Identity {
    fn known() -> Self {
        Self { known_at: Instant::now(), in_doubt: false }
    }

    /// Asks again at the next probe if the engine is too busy to answer.
    async fn verify(&mut self, backends: &Backends, backend: &Arc<Backend>) {
        self.in_doubt |= backend.client.take_broken() || self.known_at.elapsed() >= backends.config().health.identity;
        if self.in_doubt && probe_again(backends, backend, &backends.probe_limits()).await {
            *self = Self::known();
        }
    }
}

/// Watches a backend until `stop`.
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
    // An engine that keeps idle connections only briefly is not probed for each of them.
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

/// If an engine, or a proxy in front of it, sends bytes that belong to no answer, a client could receive another
/// client's answer.
fn note_strays(backends: &Backends, backend: &Backend) {
    let strays = backend.client.take_strays();
    if strays > 0 {
        backends.metrics.faults.strays(&backend.name, strays);
        let backend = backend.name.as_str();
        tracing::warn!(backend, strays, "connections closed: the backend sent bytes that belong to no response");
    }
}

/// Probes a backend. Returns whether it is gone for now and reported so at once.
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
        // It says nothing about the backend.
        Err(error @ HttpError::Exhausted { .. }) => {
            tracing::warn!(backend = backend.name, %error, "a backend could not be probed");
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

/// Watches the scheduler behind a server that answers on its own.
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
            // The other task notices a server that is gone.
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

/// The cause shown for silent streams and an unanswered probe.
pub(crate) const SILENT: &str =
    "its streams are silent and its scheduler answers no probe: requests go to other backends while there are some";

/// Watches whether streams make progress, which reveals a dead scheduler sooner than any route of its server.
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
            // A backend that comes back is a new process.
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
        // A probe that failed at once is not repeated before the next tick.
        if answered.is_none() && probe.is_none() && silence.wants_answer() {
            probe = Some(Box::pin(scheduler_answers(backends, backend)));
        }
    }
}

/// Waits for the answer of a probe and clears it; pending forever if there is none.
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
            "backend gets requests only if no other can serve"
        );
    } else {
        tracing::info!(backend = name, "the scheduler is alive after all: backend gets requests again");
    }
}
