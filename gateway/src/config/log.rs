//! `[log]`: content and format of the log that `semmoe serve` writes to standard error.

use serde::Deserialize;
use serde::de::{Deserializer, Error};
use tracing::level_filters::LevelFilter;

section! { RawLog, "`[log]`";
    /// `text`, or `json`: one object per line.
    format: LogFormat = LogFormat::Text,
    /// Minimum level logged: `off`, `error`, `warn` (problems for the operator), `info` (changes such as starts, probes
    /// and swaps), `debug` (every request) or `trace`.
    #[serde(deserialize_with = "level")]
    level: LevelFilter = LevelFilter::INFO,
    /// Which requests are logged at target `semmoe::access`, level info.
    access: Access = Access::Errors,
}

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

fn level<'de, D: Deserializer<'de>>(deserializer: D) -> Result<LevelFilter, D::Error> {
    let name = String::deserialize(deserializer)?;
    let known = LEVELS.iter().find(|level| **level == name).and_then(|level| level.parse().ok());
    known.ok_or_else(|| Error::unknown_variant(&name, &LEVELS))
}

/// Which requests the access log records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// None.
    Off,
    /// Requests with a status of 400 or above, those that broke off, and those whose client disconnected.
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

/// Format of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text, for people.
    Text,
    /// JSON, for programs.
    Json,
}
