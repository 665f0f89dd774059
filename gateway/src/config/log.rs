//! `[log]`: what `semmoe serve` writes on standard error, and how.

use serde::Deserialize;
use tracing::level_filters::LevelFilter;

/// `[log]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawLog {
    /// `text`, or `json`: one object a line.
    pub format: LogFormat,
    /// The least that is logged.
    pub level: LogLevel,
    /// Requests that are logged, at target `semmoe::access` and level info.
    pub access: Access,
}

/// Which requests stand in the access log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// None.
    Off,
    /// Those with a status from 400 on, those that broke off, and those whose client went away.
    #[default]
    Errors,
    /// All.
    All,
}

impl Access {
    pub(crate) fn wants(self, status: u16) -> bool {
        match self {
            Self::Off => false,
            Self::Errors => status >= 400,
            Self::All => true,
        }
    }
}

/// How a line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// The failure.
    Error,
    /// A problem for the operator.
    Warn,
    /// The changes: starts, probes, swaps.
    #[default]
    Info,
    /// Every request.
    Debug,
    /// Everything.
    Trace,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Off => Self::OFF,
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}
