//! The configuration read again while the gateway runs, on SIGHUP or by `POST /admin/reload`.
//!
//! The file is read and judged, and what it names is loaded and probed, beside the running state (`prepare`); then one
//! swap brings all of it (`commit`), or the old state stays and the reason is reported. What did not change is taken
//! over as it is: tokenizers, tables (also those that came by the admin plane), policies with their counts, and
//! backends with their health, pins, believed caches and requests in flight. Requests that are under way end where they
//! began.

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

/// When the state changes that often while a reload is prepared, it is given up.
const MAX_ATTEMPTS: usize = 10;

/// Reads the configuration's file again and brings it into force, or leaves everything as it is.
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
                tracing::warn!(?needs_restart, "these keys changed and only take effect after a restart");
            }
        }
        Err(error) => tracing::error!(%error, "configuration not reloaded, the old one stays in force"),
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
        // Also those that count after a restart only, which must not fail then.
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

/// Asks the backends that get other tables what they run now: they may have been restarted with the placement of those.
async fn ask_again(control: &Arc<Control>, config: &Arc<Config>) -> Result<(), ReloadError> {
    let (base, config) = (control.backends.snapshot(), Arc::clone(config));
    let backends = blocking(move || Ok(prepare::with_other_tables(&base, &config))).await?;
    let limits = control.backends.patient_limits();
    join_all(backends.iter().map(|backend| health::look_again(&control.backends, backend, &limits))).await;
    Ok(())
}

/// Makes the backends of sources those at these addresses, as far as they answer and fit. Returns also which were left
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

/// Names of backends that do not take part, and why.
pub(crate) type LeftOut = Vec<(String, String)>;

/// On whose behalf the state changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// An operator's: files are looked at again, and all of it comes into force or nothing.
    Reload,
    /// Backends were found, or are gone.
    Discovery,
}

/// Brings a configuration into force. Called by one at a time.
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
    Err(ReloadError::Moving { attempts: MAX_ATTEMPTS })
}

/// Off the threads that do network I/O.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ReloadError> + Send + 'static,
) -> Result<T, ReloadError> {
    tokio::task::spawn_blocking(work).await.map_err(StartError::from)?
}
