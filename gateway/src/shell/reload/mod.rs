//! Reloads the configuration while the gateway runs, on SIGHUP or `POST /admin/reload`.
//!
//! The file is read and validated, and everything that it names is loaded and probed, alongside the running state
//! (`prepare`). Then one swap applies all of it (`commit`), or the old state stays in effect and the reason is
//! reported. Unchanged parts are reused: tokenizers, tables (including those loaded through the admin plane), policies
//! with their counters, and backends with their health, pins, assumed caches and requests in flight. Running requests
//! finish where they began.

mod commit;
pub(crate) mod outcome;
mod prepare;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::join_all;

use crate::backends::{StartError, health};
use crate::config::{Config, SourceKey};
use crate::shell::control::Control;
use crate::shell::load;

pub(crate) use outcome::Last;
pub use outcome::{ReloadError, Reloaded};

/// Number of state changes during its preparation after which a reload is abandoned.
const MAX_ATTEMPTS: usize = 10;

/// Reloads the configuration file and applies it, or leaves everything unchanged.
pub(crate) async fn reload(control: &Arc<Control>) -> Result<Reloaded, ReloadError> {
    let _one = control.reloads.one.lock().await;
    let done = read_and_apply(control).await;
    control.reloads.note(&done);
    control.backends.metrics.operation.config_reloaded(done.as_ref().map_or_else(ReloadError::outcome, |_| "ok"));
    match &done {
        Ok(reloaded) => {
            control.backends.metrics.operation.needs_restart(reloaded.needs_restart.len());
            let Reloaded { generation, backends_added, backends_removed, needs_restart, .. } = reloaded;
            tracing::info!(generation, ?backends_added, ?backends_removed, "configuration reloaded");
            if !needs_restart.is_empty() {
                tracing::warn!(?needs_restart, "changes to these keys take effect only after a restart");
            }
        }
        Err(error) => tracing::error!(%error, "configuration not reloaded, the old one stays in effect"),
    }
    done
}

async fn read_and_apply(control: &Arc<Control>) -> Result<Reloaded, ReloadError> {
    if control.data.is_draining() {
        return Err(ReloadError::Stopping);
    }
    let running = control.backends.config();
    let file = running.source.file.clone().ok_or(ReloadError::NoFile)?;
    let (config, needs_restart) = blocking(move || {
        let mut config = Config::load_with(&file, running.source.overrides.clone())?;
        // Includes folders that take effect only after a restart, so that the restart does not fail.
        load::check_dirs(&config)?;
        let needs_restart = config.keep_fixed(&running);
        config.keep_found(&running);
        Ok((config, needs_restart))
    })
    .await?;
    let config = Arc::new(config);
    ask_again(control, &config).await?;
    let (reloaded, _) = apply(control, config, Manner::Reload).await?;
    Ok(Reloaded { needs_restart, ..reloaded })
}

/// Probes the backends that receive other tables: they may have restarted with the matching placement.
async fn ask_again(control: &Arc<Control>, config: &Arc<Config>) -> Result<(), ReloadError> {
    let (base, config) = (control.backends.snapshot(), Arc::clone(config));
    let backends = blocking(move || Ok(prepare::with_other_tables(&base, &config))).await?;
    let limits = control.backends.patient_limits();
    join_all(backends.iter().map(|backend| health::probe_again(&control.backends, backend, &limits))).await;
    Ok(())
}

/// Replaces the sources' backends with those at these addresses that answer and match. Also returns which were left
/// out, and why.
pub(crate) async fn rediscover(
    control: &Arc<Control>,
    found: HashMap<SourceKey, Vec<SocketAddr>>,
) -> Result<(Reloaded, LeftOut), ReloadError> {
    let _one = control.reloads.one.lock().await;
    if control.data.is_draining() {
        return Err(ReloadError::Stopping);
    }
    let mut config = Config::clone(&control.backends.config());
    for (SourceKey { model, source }, addresses) in found {
        if let Some(model) = config.models.iter_mut().find(|it| it.name == model) {
            model.set_found(&source, addresses);
        }
    }
    apply(control, Arc::new(config), Manner::Discovery).await
}

/// Names of the backends that were left out, and why.
pub(crate) type LeftOut = Vec<(String, String)>;

/// Who requested the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// An operator: files are rechecked, and everything or nothing is applied.
    Reload,
    /// Discovery: backends appeared or disappeared.
    Discovery,
}

/// Applies a configuration. Callers must not overlap.
async fn apply(
    control: &Arc<Control>,
    config: Arc<Config>,
    manner: Manner,
) -> Result<(Reloaded, LeftOut), ReloadError> {
    let _timed = control.backends.current.change();
    for _ in 0..MAX_ATTEMPTS {
        let base = control.backends.snapshot();
        let prepared = {
            let (control, base, config) = (Arc::clone(control), Arc::clone(&base), Arc::clone(&config));
            blocking(move || Ok(prepare::Prepared::new(&control, base, config, manner)?)).await?
        };
        let mut probed = prepared.probe(control, manner).await;
        let left_out = std::mem::take(&mut probed.left_out);
        if manner == Manner::Discovery && *probed.config == *base.config {
            return Ok((Reloaded { generation: base.generation, ..Reloaded::default() }, left_out));
        }
        let control = Arc::clone(control);
        if let Some(reloaded) = blocking(move || Ok(commit::commit(&control, probed))).await? {
            return Ok((reloaded, left_out));
        }
    }
    Err(ReloadError::Moving(MAX_ATTEMPTS))
}

/// Runs blocking work off the network threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ReloadError> + Send + 'static,
) -> Result<T, ReloadError> {
    tokio::task::spawn_blocking(work).await.map_err(StartError::from)?
}
