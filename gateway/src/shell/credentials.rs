//! Rereads certificate and key files when they change, so that renewals and rotations need no restart.
//!
//! An unusable file changes nothing: the previous credentials stay in use, and a warning and
//! `semmoe_credential_reloads_total{outcome="failed"}` report the failure. Open connections are unaffected.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::backends::{Backends, outgoing};
use crate::shell::server::ListenerTls;

/// Polls all files at an interval until `stop` is cancelled.
pub(crate) async fn watch(backends: Arc<Backends>, listeners: ListenerTls, stop: CancellationToken) {
    let pause = || tokio::time::sleep(backends.config().server.credentials_interval);
    while stop.run_until_cancelled(pause()).await.is_some() {
        let (backends, listeners) = (Arc::clone(&backends), listeners.clone());
        // A panic has already been logged; the next poll retries.
        let _ = tokio::task::spawn_blocking(move || refresh(&backends, &listeners)).await;
    }
}

/// Reloads files that have changed since they were read. Blocking.
fn refresh(backends: &Backends, listeners: &ListenerTls) {
    for (place, tls) in listeners.all() {
        if tls.seen.changed(tls.files()) {
            log_outcome(backends, place, tls.reload());
        }
    }
    for (_, member) in backends.snapshot().members() {
        let backend = &member.backend;
        if backend.files_seen.changed(outgoing::files(&backend.config)) {
            let outcome = outgoing::refresh(&backend.config, &backend.client, backend.tls.as_deref());
            log_outcome(backends, &format!("backend '{}'", backend.name), outcome);
        }
    }
}

fn log_outcome<E: std::fmt::Display>(backends: &Backends, place: &str, outcome: Result<(), E>) {
    backends.metrics.trust.credential_reload(if outcome.is_ok() { "ok" } else { "failed" });
    match outcome {
        Ok(()) => tracing::info!(place, "certificates and keys reloaded"),
        Err(cause) => {
            tracing::warn!(place, %cause, "cannot use the changed certificates or keys, the old ones stay in use")
        }
    }
}
