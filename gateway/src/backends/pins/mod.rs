//! Verifies that a backend honours pins, and keeps that evidence up to date.
//!
//! A new engine is probed before it receives requests ([`prove_at_start`]), for a few seconds at most; after that, each
//! route is probed at the rate set by [`verify::Schedule`] ([`watch`]). Responses that name their rank are free
//! evidence. An engine whose rank count is unknown is queried again at every health interval.
//!
//! An engine that refuses a pin because it has no such rank receives no pins until it has been queried again: it may
//! have been replaced, or may report more ranks than it has.
//!
//! An engine that can switch its layout may have done so since a request was pinned. A response that contradicts its
//! pin counts as evidence only once the engine has been queried again and still has the same ranks.

pub(crate) mod record;
mod verdict;

use std::sync::Arc;
use std::time::Duration;

use semmoe_engines::http::AnswerLimits;
use semmoe_engines::probe::Probe;
use semmoe_engines::verify::{self, Inconclusive, Observation, PROBED, PinTarget, ProbePlan};
use semmoe_engines::{Carrier, Dialect, Engine, Route};

use crate::backends::{Backend, Backends, Fit, Watched, health};
use record::Suspended;

/// After this time a new backend receives requests, whether or not its pins are verified.
const PROOF_LIMIT: Duration = Duration::from_secs(3);
/// Patient, because a busy engine answers a one-token probe only after the prompts ahead of it.
const PROBE_LIMITS: AnswerLimits = AnswerLimits { timeout: Duration::from_secs(30), max_bytes: 4 << 20 };
/// Initial delay before retrying an engine that refused a pin; doubled after each try.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const MAX_PAUSE: Duration = Duration::from_secs(300);

/// Whether probes can verify this route's pins. Probes are unnecessary with a single rank, with one URL per rank, or if
/// every response names its rank.
fn can_verify(engine: Engine, ranks: u16, dialect: &Dialect, route: Route) -> bool {
    let by_pin = matches!(dialect.carrier(route), Some(Carrier::Header | Carrier::Field(_)));
    ranks > 1 && by_pin && matches!(engine, Engine::Sglang | Engine::Vllm)
}

/// Verifies the pins of a newly probed engine before it receives requests.
pub(crate) async fn prove_at_start(backends: &Backends, backend: &Backend, probe: &Probe) {
    backend.pins.reset();
    let ranks = probe.dp_size.or(backend.config.ranks).unwrap_or(0);
    if ranks > backends.config().limits.ranks {
        return;
    }
    let rounds = async {
        for route in PROBED.into_iter().filter(|route| can_verify(backend.engine, ranks, &probe.dialect, *route)) {
            while requests_until_round(backend, route, ranks) == 0 && !backend.pins.are_refused() {
                round(backends, backend, route, ranks, &probe.dialect).await;
            }
        }
    };
    if tokio::time::timeout(PROOF_LIMIT, rounds).await.is_err() {
        tracing::info!(backend = backend.name, "some pins are not yet verified: the engine is slow to answer probes");
    }
}

/// Watches a backend's pins until `stop` is cancelled.
pub(crate) async fn watch(backends: Arc<Backends>, Watched { backend, stop }: Watched) {
    let rounds = PROBED.map(|route| probe_in_rounds(&backends, &backend, route));
    let work = async {
        tokio::join!(
            futures_util::future::join_all(rounds),
            ask_for_ranks(&backends, &backend),
            settle_suspended(&backends, &backend),
            settle_refusals(&backends, &backend)
        )
    };
    stop.run_until_cancelled(work).await;
}

/// Queries an engine that may have switched, and counts the suspended evidence if it has the same ranks as before. If
/// its report has changed, all evidence is dropped, including the suspended contradictions.
async fn settle_suspended(backends: &Backends, backend: &Arc<Backend>) {
    loop {
        backend.pins.suspended.notified().await;
        let answered = health::probe_again(backends, backend, &backends.patient_limits()).await;
        let suspended = backend.pins.locked(|state| state.suspended.take());
        let is_pinned = backends.member(backend).is_some_and(|member| member.fit.unpinned.is_none());
        if let Some(Suspended { route, contradicted, detail }) = suspended.filter(|_| answered && is_pinned) {
            let seen = Observation { contradicted, ..Observation::answer(false) };
            backends.note_pins(backend, route, seen, || detail);
        }
        // Limit how often the engine is queried, however many responses contradict their pins.
        tokio::time::sleep(backends.config().health.interval).await;
    }
}

/// Queries an engine about its ranks again if too little is known about them.
async fn ask_for_ranks(backends: &Backends, backend: &Arc<Backend>) {
    loop {
        tokio::time::sleep(backends.config().health.interval).await;
        let is_unpinned = backends.member(backend).is_some_and(|member| member.fit.unpinned.is_some());
        if is_unpinned && backend.health().is_healthy() {
            health::probe_again(backends, backend, &backends.patient_limits()).await;
        }
    }
}

/// Queries the ranks of an engine that refused a pin. If its report is unchanged, its pins are probed periodically, and
/// used again once none is refused.
async fn settle_refusals(backends: &Backends, backend: &Arc<Backend>) {
    loop {
        backend.pins.refusal.notified().await;
        health::probe_again(backends, backend, &backends.patient_limits()).await;
        let mut pause = FIRST_PAUSE;
        while backend.pins.are_refused() {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
            let fit = backends.member(backend).map(|member| member.fit).filter(|_| backend.health().is_healthy());
            if let Some(fit) = fit
                && takes_all_pins(backends, backend, &fit).await
            {
                backend.pins.end_refusal();
                backends.show_pins(backend, &fit);
                tracing::info!(backend = backend.name, "the engine no longer refuses pins");
            }
        }
    }
}

/// Whether the engine accepts every pin when probes cover all ranks.
async fn takes_all_pins(backends: &Backends, backend: &Backend, fit: &Fit) -> bool {
    let Some(route) = PROBED.into_iter().find(|route| can_verify(backend.engine, fit.ranks, &fit.dialect, *route))
    else {
        return true;
    };
    let _one = backend.pins.round.lock().await;
    for number in 0..ProbePlan::rounds_for_all(fit.ranks) {
        let plan = ProbePlan::round(number, fit.ranks);
        match send_probes(backend, route, &plan, &fit.dialect).await {
            Err(Inconclusive::Refused(refusal)) => {
                backends.note_refusal(backend, &refusal);
                return false;
            }
            Err(Inconclusive::Failed(_)) => return false,
            _ => {}
        }
    }
    true
}

fn requests_until_round(backend: &Backend, route: Route, ranks: u16) -> u64 {
    backend.pins.locked(|state| {
        let on = state.route(route);
        on.schedule.requests(&on.watch, ranks)
    })
}

async fn probe_in_rounds(backends: &Backends, backend: &Arc<Backend>, route: Route) {
    loop {
        let fit = backends.member(backend).map(|member| member.fit);
        if !backend.health().is_healthy()
            || backend.pins.are_refused()
            || fit.as_ref().is_some_and(|fit| fit.unpinned.is_some())
        {
            tokio::time::sleep(backends.config().health.interval).await;
            continue;
        }
        let Some(fit) = fit.filter(|fit| can_verify(backend.engine, fit.ranks, &fit.dialect, route)) else {
            backend.pins.after_requests(route, u64::MAX / 2).await;
            continue;
        };
        let state = backend.pins.state().route(route);
        tokio::time::sleep(state.schedule.pause(&state.watch)).await;
        backend.pins.after_requests(route, requests_until_round(backend, route, fit.ranks)).await;
        round(backends, backend, route, fit.ranks, &fit.dialect).await;
    }
}

/// Sends one round of probes and records the outcome.
async fn round(backends: &Backends, backend: &Backend, route: Route, ranks: u16, dialect: &Dialect) {
    let _one = backend.pins.round.lock().await;
    let mut ended = Ended { backend, route, ranks, conclusive: false };
    let number = backend.pins.locked(|state| state.route(route).schedule.rounds());
    let shown = send_probes(backend, route, &ProbePlan::round(number, ranks), dialect).await;
    ended.conclusive = shown.is_ok();
    match shown {
        Ok(shown) => {
            let outcome = if shown.observation.contradicted > 0 { "contradicted" } else { "agreed" };
            backends.metrics.pins.round(&backend.name, outcome);
            backends.note_pins(backend, route, shown.observation, || shown.detail);
        }
        Err(Inconclusive::Refused(refusal)) => {
            backends.metrics.pins.round(&backend.name, "refused");
            backends.note_refusal(backend, &refusal);
        }
        Err(reason) => {
            backends.metrics.pins.round(&backend.name, "inconclusive");
            let reason = reason.to_string();
            let news = backend.pins.locked(|state| {
                state.route_mut(route).is_some_and(|on| on.detail.replace(reason.clone()) != Some(reason.clone()))
            });
            if news {
                let backend = backend.name.as_str();
                tracing::info!(backend, %route, reason, "a round of pin probes was inconclusive");
            }
        }
    }
}

/// Marks the end of a round, even of a cancelled one: the engine may count its probes late, and they must not be
/// attributed to the next round.
struct Ended<'a> {
    backend: &'a Backend,
    route: Route,
    ranks: u16,
    conclusive: bool,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.backend.pins.round_ended(self.route, self.conclusive, self.ranks);
    }
}

async fn send_probes(
    backend: &Backend,
    route: Route,
    plan: &ProbePlan,
    dialect: &Dialect,
) -> Result<verify::Round, Inconclusive> {
    let target = PinTarget { engine: backend.engine, urls: &backend.config.urls, dialect, route };
    verify::probe(&backend.client, &target, plan, &PROBE_LIMITS).await
}
