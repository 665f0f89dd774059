//! Probing of backends: one task per backend.
//!
//! While a backend is healthy only its health route is asked, for server information costs an engine more. When it
//! comes (back), it is asked for everything, as it may be another engine with another placement by now. Between probes
//! the task sleeps; a request that could not connect wakes it. Answers 4xx or 5xx to requests evict nobody.

use std::sync::Arc;

use semmoe_engines::http::HttpError;
use semmoe_engines::probe::{self, Probe};
use tokio_util::sync::CancellationToken;

use crate::backend::Backend;
use crate::compat::Incompatible;
use crate::pins;
use crate::state::Core;

/// What one full probe came to.
pub(crate) enum Verdict {
    /// It serves from now on.
    Admitted,
    /// It does not answer.
    Silent(HttpError),
    /// What it told does not fit.
    Refused(Incompatible),
}

/// Asks a backend for everything, and opens or closes it accordingly.
pub(crate) async fn probe_fully(core: &Core, backend: &Arc<Backend>) -> Verdict {
    let found = probe::probe(&backend.client, &backend.target(), &core.probe_limits()).await;
    admit(core, backend, found).await
}

/// The same, but only if the backend answers otherwise than before: an engine that was started anew between two probes looks
/// healthy all the time, and may run another placement.
pub(crate) async fn look_again(core: &Core, backend: &Arc<Backend>) {
    let found = probe::probe(&backend.client, &backend.target(), &core.probe_limits()).await;
    if found.as_ref().is_ok_and(|found| backend.last_probe().is_none_or(|known| *known != *found)) {
        admit(core, backend, found).await;
    }
}

async fn admit(core: &Core, backend: &Arc<Backend>, found: Result<Probe, HttpError>) -> Verdict {
    if let Ok(probe) = &found {
        pins::first_look(core, backend, probe).await;
    }
    let verdict = match found {
        Err(error) => Verdict::Silent(error),
        Ok(probe) => match core.admit(backend, &probe) {
            Ok(()) => return Verdict::Admitted,
            Err(refusal) => Verdict::Refused(refusal),
        },
    };
    let cause = match &verdict {
        Verdict::Silent(error) => error.to_string(),
        Verdict::Refused(refusal) => refusal.to_string(),
        Verdict::Admitted => return verdict,
    };
    core.dismiss(backend, cause);
    verdict
}

/// Watches a backend until `stop`.
pub(crate) async fn watch(core: Arc<Core>, backend: Arc<Backend>, stop: CancellationToken) {
    let mut failures = 0;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(core.config().health.interval) => {}
            () = backend.suspected() => {}
            () = backend.gate.wait_for_trials() => core.look_at_breaker(&backend),
        }
        let check = check(&core, &backend, &mut failures);
        tokio::select! {
            () = stop.cancelled() => return,
            () = check => {}
        }
    }
}

/// An engine, or a proxy before it, that sends more than its answers would have one client's answer taken for another's.
fn note_strays(core: &Core, backend: &Backend) {
    let strays = backend.client.take_strays();
    if strays > 0 {
        core.metrics.faults.strays(&backend.name, strays);
        let backend = backend.name.as_str();
        tracing::warn!(backend, strays, "connections were closed: the backend sent bytes that belong to no answer");
    }
}

async fn check(core: &Core, backend: &Arc<Backend>, failures: &mut u32) {
    note_strays(core, backend);
    if !backend.health().is_healthy() {
        if matches!(probe_fully(core, backend).await, Verdict::Admitted) {
            *failures = 0;
        }
        return;
    }
    match probe::health(&backend.client, &backend.target(), &core.probe_limits()).await {
        Ok(()) => *failures = 0,
        Err(error) => {
            *failures += 1;
            // Nobody listens: there is nothing to wait for.
            if *failures >= core.config().health.unhealthy_after || !error.may_have_been_sent() {
                core.dismiss(backend, error.to_string());
            }
        }
    }
}
