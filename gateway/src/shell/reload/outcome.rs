//! The outcome of a reload: the changes, or why the old configuration stays in effect.

use std::sync::{Mutex, PoisonError};

use schemars::JsonSchema;
use serde::Serialize;

use crate::backends::StartError;
use crate::config::ConfigError;
use crate::observe::unix_seconds;

/// Why the old configuration stays in effect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The configuration was built in memory.
    #[error("the configuration did not come from a file, so it cannot be reloaded")]
    NoFile,
    /// The gateway is shutting down.
    #[error("the gateway is shutting down")]
    Stopping,
    /// The file is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The files that the configuration names cannot be used.
    #[error(transparent)]
    Refused(#[from] StartError),
    /// Tables or backends kept changing in the meantime.
    #[error("the state changed {0} times while the reload was being prepared; try again")]
    Moving(usize),
}

impl ReloadError {
    /// Returns the metric label.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Config(_) => "invalid",
            Self::Refused(_) => "refused",
            Self::NoFile | Self::Stopping | Self::Moving { .. } => "failed",
        }
    }
}

/// The changes made by a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct Reloaded {
    /// Generation of the state that now serves.
    pub generation: u64,
    /// New models.
    pub models_added: Vec<String>,
    /// Removed models.
    pub models_removed: Vec<String>,
    /// Backends that are new, or whose engine was replaced.
    pub backends_added: Vec<String>,
    /// Backends that were removed, or whose engine was replaced; their running requests finish there.
    pub backends_removed: Vec<String>,
    /// Models whose tokenizer or template was reloaded.
    pub tokenizers_loaded: Vec<String>,
    /// Backends whose tables were loaded.
    pub tables_loaded: Vec<String>,
    /// Keys whose new values take effect only after a restart; all other changes are in effect.
    pub needs_restart: Vec<&'static str>,
}

/// Allows only one reload at a time, and stores the result of the last one.
#[derive(Default)]
pub(crate) struct Reloads {
    pub(super) one: tokio::sync::Mutex<()>,
    last: Mutex<Option<Last>>,
}

/// The outcome of a reload.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct Last {
    unix_seconds: u64,
    outcome: &'static str,
    /// Why the old configuration stayed in effect.
    error: Option<String>,
    /// Keys that need a restart, as of the last successful reload.
    needs_restart: Vec<&'static str>,
}

impl Reloads {
    pub(crate) fn last(&self) -> Option<Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note(&self, done: &Result<Reloaded, ReloadError>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let before = last.take().map(|last| last.needs_restart).unwrap_or_default();
        *last = Some(Last {
            unix_seconds: unix_seconds(),
            outcome: done.as_ref().map_or_else(ReloadError::outcome, |_| "ok"),
            error: done.as_ref().err().map(ToString::to_string),
            needs_restart: done.as_ref().map_or(before, |reloaded| reloaded.needs_restart.clone()),
        });
    }
}
