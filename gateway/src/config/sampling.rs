//! `[sampling]`: the fraction of requests whose routed experts are requested from the engine, and what is recorded.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::ConfigError;
use super::value::{at_least, share, within};

/// A month; a longer interval is probably a mistake.
const MAX_INTERVAL_SECONDS: f64 = 31.0 * 86_400.0;
/// A year; a longer retention is probably a mistake.
const MAX_RETENTION_HOURS: f64 = 366.0 * 24.0;

section! { RawSampling, "`[sampling]`";
    /// Fraction of the eligible requests, 0 to 1, for which the gateway requests routed experts. 0: off.
    share: f64 = 0.0,
    /// Maximum size of a response, or of a stream event, that is buffered to remove the routed experts; a longer one is
    /// relayed with them. They occupy about 1.4 x 4 bytes per token, layer and chosen expert.
    max_answer_bytes: usize = 8 << 20,
    /// The drift alarm is raised when the prediction's moving average exceeds the observed rate by more than this.
    drift_raise: f64 = 0.05,
    /// The drift alarm is cleared when the prediction's moving average exceeds the observed rate by less than this.
    drift_clear: f64 = 0.02,
    /// Consecutive samples required to raise or clear the alarm; also the length of the moving average.
    drift_samples: u32 = 100,
    /// Folder for rolling profiles; absent: none are written.
    profile_dir: Option<PathBuf> = None,
    /// Interval between writes of profiles and traces.
    profile_interval_seconds: f64 = 600.0,
    /// Maximum number of entries (token, layer, expert) in a model's rolling profile, at about 16 bytes each.
    profile_entries: usize = 8_000_000,
    /// Counts older than this are dropped; counts are retained for at least half of this period.
    profile_retention_hours: f64 = 168.0,
    /// Folder for traces: the token ids and routes of every sampled request. Absent: none are written.
    trace_dir: Option<PathBuf> = None,
    /// Number of tokens after which a trace is complete.
    trace_tokens: usize = 100_000,
    /// Maximum number of traces per model; the oldest are removed first.
    trace_files: usize = 10,
    /// Traces older than this are removed.
    trace_retention_hours: f64 = 24.0,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SamplingConfig {
    pub(crate) share: f64,
    pub(crate) max_answer_bytes: usize,
    pub(crate) drift: DriftRules,
    /// Interval between writes.
    pub(crate) interval: Duration,
    pub(crate) profile: Option<ProfileConfig>,
    pub(crate) traces: Option<TraceConfig>,
}

impl SamplingConfig {
    /// Lists the folders that must exist, with their keys.
    pub(crate) fn dirs(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let profile = self.profile.as_ref().map(|profile| ("sampling.profile_dir", profile.dir.as_path()));
        profile.into_iter().chain(self.traces.as_ref().map(|traces| ("sampling.trace_dir", traces.dir.as_path())))
    }
}

/// Thresholds for raising and clearing the drift alarm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DriftRules {
    pub(crate) raise: f64,
    pub(crate) clear: f64,
    pub(crate) samples: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ProfileConfig {
    pub(crate) dir: PathBuf,
    pub(crate) limits: RollingLimits,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TraceConfig {
    pub(crate) dir: PathBuf,
    pub(crate) tokens: usize,
    pub(crate) files: usize,
    pub(crate) retention: Duration,
}

/// Limits of a rolling profile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RollingLimits {
    pub(crate) entries: usize,
    pub(crate) retention: Duration,
}

pub(super) fn sampling(raw: RawSampling, base: &Path) -> Result<SamplingConfig, ConfigError> {
    let raise = share("sampling.drift_raise", raw.drift_raise)?;
    at_least("sampling.drift_samples", raw.drift_samples, 1)?;
    let interval = raw.profile_interval_seconds;
    let interval = within("sampling.profile_interval_seconds", interval, 1.0..=MAX_INTERVAL_SECONDS)?;
    let hours = |key: &str, value: f64| {
        within(key, value, 0.1..=MAX_RETENTION_HOURS).map(|hours| Duration::from_secs_f64(hours * 3600.0))
    };
    let limits = RollingLimits {
        entries: at_least("sampling.profile_entries", raw.profile_entries, 1000)?,
        retention: hours("sampling.profile_retention_hours", raw.profile_retention_hours)?,
    };
    let traces = TraceConfig {
        dir: base.join(raw.trace_dir.clone().unwrap_or_default()),
        tokens: at_least("sampling.trace_tokens", raw.trace_tokens, 1)?,
        files: at_least("sampling.trace_files", raw.trace_files, 1)?,
        retention: hours("sampling.trace_retention_hours", raw.trace_retention_hours)?,
    };
    Ok(SamplingConfig {
        share: share("sampling.share", raw.share)?,
        max_answer_bytes: at_least("sampling.max_answer_bytes", raw.max_answer_bytes, 1024)?,
        drift: DriftRules {
            raise,
            clear: within("sampling.drift_clear", raw.drift_clear, 0.0..=raise)?,
            samples: raw.drift_samples,
        },
        interval: Duration::from_secs_f64(interval),
        profile: raw.profile_dir.map(|dir| ProfileConfig { dir: base.join(dir), limits }),
        traces: raw.trace_dir.map(|_| traces),
    })
}
