//! Background work for sampling: evaluates responses in sequence, and writes the profiles periodically.

use std::sync::Arc;

use semmoe_engines::SharedError;
use semmoe_tables::{FormatError, Profile};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::backend::Activations;
use super::kept::{found_or, now};
use super::observe::{Observed, observe};
use super::rolling::Rolling;
use super::seen::{Observation, Seen};
use super::{Live, ModelProfile, files, traces};
use crate::config::{Config, DriftRules, ProfileConfig, SamplingConfig};

/// The running task.
pub(crate) struct Task {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// The task's inputs.
struct Work {
    live: Arc<Live>,
    /// Returns the current settings.
    config: Box<dyn Fn() -> Arc<Config> + Send + Sync>,
}

impl Task {
    /// Starts the task; returns `None` if it was started before. `config` returns the current settings.
    pub(crate) fn start(live: &Arc<Live>, config: impl Fn() -> Arc<Config> + Send + Sync + 'static) -> Option<Self> {
        let waiting = live.waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()?;
        let now = config();
        if let Some(traces) = now.sampling.traces.as_ref().filter(|_| now.sampling.share > 0.0) {
            let dir = traces.dir.display();
            tracing::warn!(%dir, "saving the token ids of sampled requests in traces");
        }
        let stop = CancellationToken::new();
        let work = Arc::new(Work { live: Arc::clone(live), config: Box::new(config) });
        let task = tokio::spawn(run(work, waiting, stop.clone()));
        Some(Self { stop, task })
    }

    /// Evaluates the queued responses and writes the profiles.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        if let Err(error) = self.task.await {
            tracing::error!(%error, "samples were left unfinished");
        }
    }
}

async fn run(work: Arc<Work>, mut waiting: mpsc::Receiver<Observation>, stop: CancellationToken) {
    let write = || {
        blocking(&work, |Work { live, config }| {
            write_profiles(live);
            traces::write_all(&mut live.traces(), &live.metrics, &config());
        })
    };
    let note = |observation| blocking(&work, move |work| work.note(&observation));
    let interval = || (work.config)().sampling.interval;
    let mut pause = Box::pin(tokio::time::sleep(interval()));
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(observation) = waiting.recv() => note(observation).await,
            () = &mut pause => {
                write().await;
                pause.set(tokio::time::sleep(interval()));
            }
        }
    }
    waiting.close();
    while let Some(observation) = waiting.recv().await {
        note(observation).await;
    }
    write().await;
}

/// Runs `work` off the network threads. A panic costs only the response that caused it.
async fn blocking<T: Send + 'static>(on: &Arc<Work>, work: impl FnOnce(&Work) -> T + Send + 'static) {
    let on = Arc::clone(on);
    if let Err(error) = tokio::task::spawn_blocking(move || work(&on)).await {
        tracing::error!(%error, "a sample or profile was abandoned");
    }
}

impl Work {
    /// Evaluates one response and records the result.
    fn note(&self, Observation { seen, answer }: &Observation) {
        let (name, metrics) = (seen.backend.name.as_str(), &self.live.metrics);
        let observed = match observe(seen, answer) {
            Ok(observed) => observed,
            Err(outcome) => {
                tracing::debug!(backend = name, outcome, "a sample was rejected");
                metrics.sampled(name, outcome);
                return;
            }
        };
        let (local, all) = (observed.local.iter().sum::<u64>(), observed.all.iter().sum::<u64>());
        for (at, phase) in ["prompt", "decode"].into_iter().enumerate() {
            metrics.activations(name, phase, observed.local[at], observed.all[at] - observed.local[at]);
        }
        metrics.rates(name, all, local as f64 / all as f64, observed.predicted);
        let config = (self.config)();
        self.note_drift(seen, &Activations { local, all, predicted: observed.predicted }, &config.sampling.drift);
        let outcome = match self.keep(seen, &observed, &config.sampling) {
            Ok(()) => "observed",
            Err(error) => {
                tracing::warn!(model = seen.model, %error, "a sample could not be recorded");
                "not_counted"
            }
        };
        metrics.sampled(name, outcome);
    }

    /// Adds a sample to the model's profile and trace.
    fn keep(&self, seen: &Seen, observed: &Observed, sampling: &SamplingConfig) -> Result<(), FormatError> {
        if let Some(config) = &sampling.profile {
            self.count(&seen.model, observed, config)?;
        }
        match &sampling.traces {
            Some(config) => traces::add(&mut self.live.traces(), &self.live.metrics, config, &seen.model, observed),
            None => Ok(()),
        }
    }

    fn note_drift(&self, seen: &Seen, sample: &Activations, rules: &DriftRules) {
        let name = seen.backend.name.as_str();
        let Some(raised) = seen.backend.add(seen.generation, sample, rules) else { return };
        self.live.metrics.drift(name, raised);
        let difference = seen.backend.figures().drift.mean().unwrap_or(0.0);
        if raised {
            tracing::warn!(
                backend = name,
                difference,
                "drift: activations are less local than the tables predict; record traffic and solve again"
            );
        } else {
            tracing::info!(backend = name, difference, "drift is over: predictions match observations again");
        }
    }

    fn count(&self, model: &str, observed: &Observed, config: &ProfileConfig) -> Result<(), FormatError> {
        let mut profiles = self.live.profiles();
        let profile = found_or(&mut profiles, model, || open(model, observed, config))?;
        let added = profile.rolling.add(&observed.ids, observed.prompt, &observed.routes, now());
        show(&self.live, model, profile);
        added
    }
}

/// Starts a model's profile from the file of an earlier run, if that is usable.
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

fn show(live: &Live, model: &str, profile: &mut ModelProfile) {
    let dropped = profile.rolling.take_dropped();
    live.metrics.profile(model, profile.rolling.tokens(), profile.rolling.entries(), dropped);
}

/// Writes each model's rolling profile and removes empty ones. Blocking.
pub(crate) fn write_profiles(live: &Live) {
    for (model, profile) in live.profiles().iter_mut() {
        let written = profile.rolling.bytes(now()).map_err(SharedError::from).and_then(|bytes| {
            let written = match bytes {
                Some(bytes) => files::write(&profile.file, &bytes),
                None => std::fs::remove_file(&profile.file).or_else(|error| match error.kind() {
                    std::io::ErrorKind::NotFound => Ok(()),
                    _ => Err(error),
                }),
            };
            written.map_err(|error| format!("{}: {error}", profile.file.display()).into())
        });
        live.metrics.profile_written(if written.is_ok() { "ok" } else { "failed" });
        if let Err(error) = &written {
            tracing::warn!(model, %error, "the rolling profile could not be written");
        }
        profile.written = Some((now(), written));
        show(live, model, profile);
    }
}
