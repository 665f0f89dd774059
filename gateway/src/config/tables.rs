//! `[tables]`: how tables are loaded while the gateway runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::ConfigError;
use super::value::{seconds, within};

/// Every one of them keeps a copy of its file.
const MAX_EARLIER: usize = 16;

section! { RawTables, "`[tables]`";
    /// Look at the backends' files (`tables`) and load one that changed.
    watch: bool = false,
    /// Time between two looks. A file must be the same in two of them before it is loaded.
    watch_interval_seconds: f64 = 2.0,
    /// Earlier tables kept for each backend, to go back to.
    history: usize = 2,
    /// Folder for the copies of tables that are in use or kept. They have
    /// no names in it, and are gone with the process.
    spool_dir: PathBuf = "/tmp".into(),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TablesConfig {
    /// Between two looks at the files; `None`: they are not watched.
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
