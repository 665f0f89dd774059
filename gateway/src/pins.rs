//! Keeps what is known about a backend's pins up to date.
//!
//! A new engine is probed before it gets requests ([`first_look`]), for a few seconds at most; after that as often as
//! [`verify::Schedule`] says ([`watch`]). Answers that name their rank are evidence too, and cost nothing. An engine
//! whose number of ranks is unknown is asked again at every health interval.
//!
//! An engine that can switch its layout may have done so since a request was pinned. An answer that contradicts its pin
//! counts only once that engine was asked again and still has the same ranks.

pub(crate) mod record;

use std::sync::Arc;
use std::time::Duration;

use semmoe_engines::http::AnswerLimits;
use semmoe_engines::probe::Probe;
use semmoe_engines::verify::{self, Observation, PinTarget, ProbePlan};
use semmoe_engines::{Carrier, Dialect, Engine, Route};

use crate::backend::{Backend, Watched};
use crate::health;
use crate::state::Core;
use record::Suspended;

/// A new backend gets requests after this time, whether its pins are verified or not.
const FIRST_LOOK: Duration = Duration::from_secs(3);
/// A busy engine answers a probe of one token after the prompts before it.
const PROBE_LIMITS: AnswerLimits = AnswerLimits { timeout: Duration::from_secs(30), max_bytes: 4 << 20 };

/// Whether there is something to verify: not with one rank, a URL for each rank, or answers that all name their rank.
fn can_verify(engine: Engine, ranks: u16, dialect: &Dialect) -> bool {
    let pins = |route| matches!(dialect.carrier(route), Ok(Carrier::Header | Carrier::Field(_)));
    ranks > 1 && (pins(Route::Chat) || pins(Route::Generate)) && matches!(engine, Engine::Sglang | Engine::Vllm)
}

/// Verifies the pins of an engine that was just probed, before it gets requests.
pub(crate) async fn first_look(core: &Core, backend: &Backend, probe: &Probe) {
    backend.pins.reset();
    let ranks = backend.config.ranks.or(probe.dp_size).unwrap_or(0);
    if ranks > core.config().limits.ranks || !can_verify(backend.engine, ranks, &probe.dialect) {
        return;
    }
    let rounds = async {
        while backend.pins.locked(|state| state.schedule.requests(&state.watch, ranks)) == 0 {
            round(core, backend, ranks, &probe.dialect).await;
        }
    };
    if tokio::time::timeout(FIRST_LOOK, rounds).await.is_err() {
        backend.pins.locked(|state| state.schedule.ended(false));
        tracing::info!(backend = backend.name, "pins are not verified yet: the engine is slow to answer probes");
    }
}

/// Watches a backend until `stop`.
pub(crate) async fn watch(core: Arc<Core>, Watched { backend, stop }: Watched) {
    let work = async { tokio::join!(probe_in_rounds(&core, &backend), settle_suspended(&core, &backend)) };
    stop.run_until_cancelled(work).await;
}

/// Asks an engine that may have switched, and counts what was suspended if it has the same ranks as before. If its
/// answer differs from the last one, all evidence is dropped, the suspended contradictions included.
async fn settle_suspended(core: &Core, backend: &Arc<Backend>) {
    loop {
        backend.pins.suspended.notified().await;
        let answered = health::look_again(core, backend, &core.patient_limits()).await;
        let suspended = backend.pins.locked(|state| state.suspended.take());
        let is_pinned = core.member(backend).is_some_and(|member| member.fit.unpinned.is_none());
        if let Some(Suspended { contradicted, detail }) = suspended.filter(|_| answered && is_pinned) {
            core.note_pins(backend, Observation { contradicted, ..Observation::answer(false) }, || detail);
        }
        // Limits how often the engine is asked, however many answers contradict their pins.
        tokio::time::sleep(core.config().health.interval).await;
    }
}

async fn probe_in_rounds(core: &Core, backend: &Arc<Backend>) {
    loop {
        let interval = core.config().health.interval;
        let member = core.member(backend);
        if !backend.health().is_healthy() {
            tokio::time::sleep(interval).await;
            continue;
        }
        if member.as_ref().is_some_and(|member| member.fit.unpinned.is_some()) {
            tokio::time::sleep(interval).await;
            health::look_again(core, backend, &core.patient_limits()).await;
            continue;
        }
        let fit = member.map(|member| member.fit);
        let Some(fit) = fit.filter(|fit| can_verify(backend.engine, fit.ranks, &fit.dialect)) else {
            backend.pins.after_requests(u64::MAX / 2).await;
            continue;
        };
        let state = backend.pins.state();
        tokio::time::sleep(state.schedule.pause(&state.watch)).await;
        backend.pins.after_requests(state.schedule.requests(&state.watch, fit.ranks)).await;
        round(core, backend, fit.ranks, &fit.dialect).await;
    }
}

/// One round of probes.
async fn round(core: &Core, backend: &Backend, ranks: u16, dialect: &Dialect) {
    let _one = backend.pins.round.lock().await;
    let number = backend.pins.locked(|state| state.schedule.rounds());
    let plan = ProbePlan::round(number, ranks);
    let target = PinTarget { engine: backend.engine, urls: &backend.config.urls, dialect };
    let shown = verify::probe(&backend.client, &target, &plan, &PROBE_LIMITS).await;
    backend.pins.locked(|state| state.schedule.ended(shown.is_ok()));
    match shown {
        Ok(shown) => {
            core.metrics
                .pins
                .round(&backend.name, if shown.observation.contradicted > 0 { "contradicted" } else { "agreed" });
            core.note_pins(backend, shown.observation, || shown.detail);
        }
        Err(reason) => {
            core.metrics.pins.round(&backend.name, "inconclusive");
            let reason = reason.to_string();
            let news = backend.pins.locked(|state| {
                let news = state.detail.as_ref() != Some(&reason);
                state.detail = Some(reason.clone());
                news
            });
            if news {
                tracing::info!(backend = backend.name, reason, "a round of pin probes was inconclusive");
            }
        }
    }
}
