//! `[tables]`: loading tables while the gateway runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::ConfigError;
use super::value::{seconds, within};

/// Maximum history length. Limited because each entry keeps a copy of its file.
const MAX_EARLIER: usize = 16;

section! { RawTables, "`[tables]`";
    /// Poll the backends' table files (`tables`) and load those that have changed.
    watch: bool = false,
    /// Interval between polls. A file must be unchanged across two of them before it is loaded.
    watch_interval_seconds: f64 = 2.0,
    /// Number of earlier tables retained per backend for rollbacks.
    history: usize = 2,
    /// Folder for copies of the tables in use and in the history. The copies are unlinked at once and vanish with the
    /// process.
    spool_dir: PathBuf = "/tmp".into(),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TablesConfig {
    /// Interval between polls of the files; `None` disables polling.
    pub(crate) watch: Option<Duration>,
    pub(crate) history: usize,
    pub(crate) spool_dir: PathBuf,
}

pub(super) fn tables(raw: RawTables, base: &Path) -> Result<TablesConfig, ConfigError> {
    let interval = seconds("tables.watch_interval_seconds", raw.watch_interval_seconds)?;
    within("tables.history", raw.history, 0..=MAX_EARLIER)?;
    let spool_dir = base.join(raw.spool_dir);
    Ok(TablesConfig { watch: raw.watch.then_some(interval), history: raw.history, spool_dir })
}
