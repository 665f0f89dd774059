//! `[tables]`: loading tables while the gateway runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::ConfigError;
use super::value::{seconds, within};

/// Every one of them keeps a copy of its file.
const MAX_EARLIER: usize = 16;

section! { RawTables, "`[tables]`";
    /// Poll the backends' table files (`tables`) and load those that changed.
    watch: bool = false,
    /// Time between two polls. A file must be unchanged across two of them before it is loaded.
    watch_interval_seconds: f64 = 2.0,
    /// Earlier tables kept per backend for rollbacks.
    history: usize = 2,
    /// Folder for copies of the tables in use or kept. The copies are unlinked at once and vanish with the process.
    spool_dir: PathBuf = "/tmp".into(),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TablesConfig {
    /// Time between two polls of the files; `None`: no polling.
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
