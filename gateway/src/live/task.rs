//! The work behind the data plane: answers are looked at one after the other, profiles written now and then.

use std::sync::Arc;

use semmoe_tables::{FormatError, Profile};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::kept::{found_or, now};
use super::observe::{Observed, observe};
use super::rolling::Rolling;
use super::seen::{Observation, Seen};
use super::{ModelProfile, files, traces};
use crate::config::ProfileConfig;
use crate::state::Core;

/// The running task.
pub(crate) struct Task {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Task {
    /// `None` if it was started before.
    pub(crate) fn start(core: &Arc<Core>) -> Option<Self> {
        let waiting = core.live.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()?;
        let config = core.config();
        if let Some(traces) = config.sampling.traces.as_ref().filter(|_| config.sampling.share > 0.0) {
            let dir = traces.dir.display();
            tracing::warn!(%dir, "the token ids of sampled requests are saved in traces");
        }
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(Arc::clone(core), waiting, stop.clone()));
        Some(Self { stop, task })
    }

    /// Looks at what waits and writes the profiles.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        if let Err(error) = self.task.await {
            tracing::error!(%error, "samples were not finished");
        }
    }
}

async fn run(core: Arc<Core>, mut waiting: mpsc::Receiver<Observation>, stop: CancellationToken) {
    let write = || {
        blocking(&core, |core| {
            write_profiles(core);
            traces::write_all(&mut core.live.traces(), &core.metrics.live, &core.config());
        })
    };
    let look = |observation| blocking(&core, move |core| note(core, &observation));
    let mut pause = Box::pin(tokio::time::sleep(core.config().sampling.interval));
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(observation) = waiting.recv() => look(observation).await,
            () = &mut pause => {
                write().await;
                pause.set(tokio::time::sleep(core.config().sampling.interval));
            }
        }
    }
    waiting.close();
    while let Some(observation) = waiting.recv().await {
        look(observation).await;
    }
    write().await;
}

/// Runs `work` off the network threads. One answer that made the code panic costs itself, not those behind it.
async fn blocking<T: Send + 'static>(core: &Arc<Core>, work: impl FnOnce(&Core) -> T + Send + 'static) {
    let core = Arc::clone(core);
    if let Err(error) = tokio::task::spawn_blocking(move || work(&core)).await {
        tracing::error!(%error, "a sample or profile was abandoned");
    }
}

/// Looks at one answer and counts what it shows.
fn note(core: &Core, Observation { seen, answer }: &Observation) {
    let name = seen.backend.name.as_str();
    let observed = match observe(seen, answer) {
        Ok(observed) => observed,
        Err(outcome) => {
            tracing::debug!(backend = name, outcome, "a sample was rejected");
            core.metrics.live.sampled(name, outcome);
            return;
        }
    };
    let (local, all) = (observed.local.iter().sum::<u64>(), observed.all.iter().sum::<u64>());
    for (at, phase) in ["prompt", "decode"].into_iter().enumerate() {
        core.metrics.live.activations(name, phase, observed.local[at], observed.all[at] - observed.local[at]);
    }
    core.metrics.live.rates(name, all, local as f64 / all as f64, observed.predicted);
    note_drift(core, seen, local, all, observed.predicted);
    let outcome = match keep(core, seen, &observed) {
        Ok(()) => "observed",
        Err(error) => {
            tracing::warn!(model = seen.model.name, %error, "a sample could not be kept");
            "not_counted"
        }
    };
    core.metrics.live.sampled(name, outcome);
}

/// Adds a sample to what is kept.
fn keep(core: &Core, seen: &Seen, observed: &Observed) -> Result<(), FormatError> {
    let sampling = &core.config().sampling;
    if let Some(config) = &sampling.profile {
        count(core, seen, observed, config)?;
    }
    match &sampling.traces {
        Some(config) => traces::add(&mut core.live.traces(), &core.metrics.live, config, &seen.model.name, observed),
        None => Ok(()),
    }
}

/// The alarm is about the tables in use: a sample of those before says nothing about them.
fn note_drift(core: &Core, seen: &Seen, local: u64, all: u64, predicted: Option<f64>) {
    let snapshot = core.snapshot();
    let in_use = snapshot.position(&seen.backend).and_then(|at| snapshot.at(at).1.tables.as_ref());
    if in_use.is_none_or(|in_use| in_use.generation != seen.tables.generation) {
        return;
    }
    let name = seen.backend.name.as_str();
    let rules = &snapshot.config.sampling.drift;
    let Some(raised) = seen.backend.live.add(local, all, predicted, rules) else { return };
    core.metrics.live.drift(name, raised);
    let difference = seen.backend.live.figures().drift.mean().unwrap_or(0.0);
    if raised {
        tracing::warn!(
            backend = name,
            difference,
            "drift: activations are less local than the tables predict; record and solve again"
        );
    } else {
        tracing::info!(backend = name, difference, "drift is over: the tables predict well again");
    }
}

fn count(core: &Core, seen: &Seen, observed: &Observed, config: &ProfileConfig) -> Result<(), FormatError> {
    let model = &seen.model.name;
    let mut profiles = core.live.profiles();
    let profile = found_or(&mut profiles, model, || open(model, observed, config))?;
    let added = profile.rolling.add(&observed.ids, observed.prompt, &observed.routes, now());
    show(core, model, profile);
    added
}

/// Starts a model's profile, with what an earlier run wrote if that can be used.
fn open(model: &str, observed: &Observed, config: &ProfileConfig) -> Result<ModelProfile, FormatError> {
    let mut rolling = Rolling::new(observed.model.clone(), config.limits, now())?;
    let file = files::path(&config.dir, model);
    if file.exists() {
        match Profile::open(&file).and_then(|written| rolling.adopt(&written, now())) {
            Ok(true) => tracing::info!(model, tokens = rolling.tokens(), "resuming the rolling profile"),
            Ok(false) => {
                tracing::info!(model, "starting a new rolling profile: the existing one is too old or too large")
            }
            Err(error) => tracing::warn!(model, %error, "starting a new rolling profile"),
        }
    }
    Ok(ModelProfile { rolling, file, written: None })
}

fn show(core: &Core, model: &str, profile: &mut ModelProfile) {
    let dropped = profile.rolling.take_dropped();
    core.metrics.live.profile(model, profile.rolling.tokens(), profile.rolling.entries(), dropped);
}

/// Writes every model's rolling profile; one that holds nothing any more is removed. Blocking.
pub(crate) fn write_profiles(core: &Core) {
    for (model, profile) in core.live.profiles().iter_mut() {
        let written = profile.rolling.bytes(now()).map_err(|error| error.to_string()).and_then(|bytes| {
            let written = match bytes {
                Some(bytes) => files::write(&profile.file, &bytes),
                None => std::fs::remove_file(&profile.file).or_else(|error| match error.kind() {
                    std::io::ErrorKind::NotFound => Ok(()),
                    _ => Err(error),
                }),
            };
            written.map_err(|error| format!("{}: {error}", profile.file.display()))
        });
        core.metrics.live.profile_written(if written.is_ok() { "ok" } else { "failed" });
        if let Err(error) = &written {
            tracing::warn!(model, error, "the rolling profile could not be written");
        }
        profile.written = Some((now(), written));
        show(core, model, profile);
    }
}
