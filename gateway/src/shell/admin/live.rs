//! `GET /admin/live` and `POST /admin/live/profiles`: statistics of the samples, and the rolling profiles.

use std::path::PathBuf;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

use crate::backends::{Member, RequestError};
use crate::observe::Figures;
use crate::observe::live::write_profiles;
use crate::shell::control::Control;

#[derive(Serialize, JsonSchema)]
pub(super) struct Live {
    /// Fraction of the eligible requests that is sampled.
    share: f64,
    backends: Vec<Backend>,
    profiles: Vec<Profile>,
}

#[derive(Serialize, JsonSchema)]
struct Backend {
    name: String,
    /// `off`, `no tables`, `cannot be asked` (because of the engine, its version or its flag), `refused`, `none fit`
    /// (see `unfit`) or `on`.
    sampling: &'static str,
    /// Number of requests that were due but could not be sampled: vLLM does not stream routed experts, and some
    /// requests set the field themselves.
    unfit: u64,
    /// Local fraction of the activations of all samples since the tables were loaded.
    observed_lar: Option<f64>,
    activations: u64,
    /// Number of samples with a prediction; the rates below are over their activations.
    compared: u64,
    mean_observed: Option<f64>,
    mean_predicted: Option<f64>,
    drift: Drift,
}

#[derive(Serialize, JsonSchema)]
struct Drift {
    alarm: bool,
    /// Predicted minus observed rate, over the activations of the latest samples.
    difference: Option<f64>,
}

#[derive(Serialize, JsonSchema)]
struct Profile {
    model: String,
    file: PathBuf,
    tokens: u64,
    entries: usize,
    written_unix_seconds: Option<u64>,
    error: Option<String>,
}

pub(super) async fn show(State(control): State<Arc<Control>>) -> Result<Json<Live>, RequestError> {
    answer(control, collect).await
}

/// Writes the profiles immediately.
pub(super) async fn write(State(control): State<Arc<Control>>) -> Result<Json<Live>, RequestError> {
    answer(control, |control| {
        write_profiles(&control.live);
        collect(control)
    })
    .await
}

/// Runs off the network threads, because a profile may be in the middle of a write.
pub(super) async fn answer<T: Send + 'static>(
    control: Arc<Control>,
    work: fn(&Control) -> T,
) -> Result<Json<T>, RequestError> {
    let done = tokio::task::spawn_blocking(move || work(&control)).await;
    done.map(Json).map_err(RequestError::from)
}

pub(super) fn collect(control: &Control) -> Live {
    let snapshot = control.backends.snapshot();
    let share = snapshot.config.sampling.share;
    let backends = snapshot.members().map(|(_, member)| backend(member, share)).collect();
    let profiles = control.live.profiles();
    let profile = |(model, profile): (&String, &crate::observe::live::ModelProfile)| Profile {
        model: model.clone(),
        file: profile.file.clone(),
        tokens: profile.rolling.tokens(),
        entries: profile.rolling.entries(),
        written_unix_seconds: profile.written.as_ref().map(|(at, _)| *at),
        error: profile.written.as_ref().and_then(|(_, outcome)| outcome.as_ref().err().map(ToString::to_string)),
    };
    Live { share, backends, profiles: profiles.iter().map(profile).collect() }
}

fn backend(member: &Member, share: f64) -> Backend {
    let live = &member.backend.live;
    let figures = live.figures();
    let (rates, Figures { local, activations, compared, drift, .. }) = (figures.rates(), figures);
    let sampling = match member.tables {
        _ if share <= 0.0 => "off",
        None => "no tables",
        Some(_) if member.fit.unpinned.is_some() => "routed by load",
        Some(_) if live.has_refused() => "refused",
        Some(_) if !live.can_be_asked() => "cannot be asked",
        Some(_) if activations == 0 && live.unfit() > 0 => "none fit",
        Some(_) => "on",
    };
    Backend {
        name: member.backend.name.clone(),
        sampling,
        unfit: live.unfit(),
        observed_lar: (activations > 0).then(|| local as f64 / activations as f64),
        activations,
        compared,
        mean_observed: rates.map(|(_, observed)| observed),
        mean_predicted: rates.map(|(predicted, _)| predicted),
        drift: Drift { alarm: drift.raised, difference: drift.mean() },
    }
}
