//! `[tables]`: how tables are loaded while the gateway runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::ConfigError;

/// Every one of them keeps a copy of its file.
const MAX_EARLIER: usize = 16;

/// `[tables]`
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawTables {
    /// Look at the backends' files (`tables`) and load one that changed.
    pub watch: bool,
    /// Time between two looks. A file must be the same in two of them before it is loaded.
    pub watch_interval_seconds: f64,
    /// Earlier tables kept for each backend, to go back to.
    pub history: usize,
    /// Folder for the copies of tables that are in use or kept. They have
    /// no names in it, and are gone with the process.
    pub spool_dir: PathBuf,
}

impl Default for RawTables {
    fn default() -> Self {
        Self { watch: false, watch_interval_seconds: 2.0, history: 2, spool_dir: "/tmp".into() }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TablesConfig {
    /// Between two looks at the files; `None`: they are not watched.
    pub(crate) watch: Option<Duration>,
    pub(crate) history: usize,
    pub(crate) spool_dir: PathBuf,
}

pub(super) fn tables(raw: RawTables, base: &Path) -> Result<TablesConfig, ConfigError> {
    let interval = super::validate::seconds("tables.watch_interval_seconds", raw.watch_interval_seconds)?;
    if raw.history > MAX_EARLIER {
        let cause = format!("{}, expected at most {MAX_EARLIER}", raw.history);
        return Err(ConfigError::value("tables.history", cause));
    }
    let spool_dir = base.join(raw.spool_dir);
    Ok(TablesConfig { watch: raw.watch.then_some(interval), history: raw.history, spool_dir })
}
