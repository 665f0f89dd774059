//! The outcome of a reload: the changes, or why the old configuration stays.

use std::sync::{Mutex, PoisonError};

use schemars::JsonSchema;
use serde::Serialize;

use crate::backends::StartError;
use crate::config::ConfigError;
use crate::observe::unix_seconds;

/// Why the old configuration stays.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// It was made in memory.
    #[error("the configuration did not come from a file, so it cannot be reloaded")]
    NoFile,
    /// The gateway ends.
    #[error("the gateway is shutting down")]
    Stopping,
    /// The file is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The files it names cannot be used.
    #[error(transparent)]
    Refused(#[from] StartError),
    /// Tables or backends changed again and again meanwhile.
    #[error("the state changed {attempts} times while the reload was prepared; try again")]
    Moving {
        /// How often it was tried.
        attempts: usize,
    },
}

impl ReloadError {
    /// As it is counted.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Config(_) => "invalid",
            Self::Refused(_) => "refused",
            Self::NoFile | Self::Stopping | Self::Moving { .. } => "failed",
        }
    }
}

/// The changes of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[non_exhaustive]
pub struct Reloaded {
    /// Of the state that serves now.
    pub generation: u64,
    /// Models that were not there before.
    pub models_added: Vec<String>,
    /// Models that are gone.
    pub models_removed: Vec<String>,
    /// Backends that were not there before, or are another engine now.
    pub backends_added: Vec<String>,
    /// Backends that are gone, or are another engine now; their requests end there.
    pub backends_removed: Vec<String>,
    /// Models whose tokenizer or template was loaded again.
    pub tokenizers_loaded: Vec<String>,
    /// Backends whose tables were loaded.
    pub tables_loaded: Vec<String>,
    /// Keys with a new value that counts only after a restart; everything else is in force.
    pub needs_restart: Vec<&'static str>,
}

/// One reload at a time, and what came of the last one.
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
    /// Why the old configuration stayed.
    error: Option<String>,
    /// Of the last one that succeeded.
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
