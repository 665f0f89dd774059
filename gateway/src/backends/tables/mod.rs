//! Tables of backends while the gateway runs.
//!
//! | part | what |
//! |---|---|
//! | `file` | a file from outside: opened once, copied, the copy mapped |
//! | `upload` | the body of a request, copied and mapped likewise |
//! | `change` | load, check, swap; on a failure the old tables stay, and the reason is kept |
//! | `hot_swap` | a worker moves its experts to where new tables say, and then they are swapped in |
//! | `watch` | files that changed |
//!
//! All of it runs off the network threads, one load at a time. Requests continue with the tables they began with and
//! take no lock: later requests get the next snapshot.

mod change;
mod file;
mod hot_swap;
mod upload;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;

use semmoe_engines::SharedError;
use semmoe_tables::Tables;
use semmoe_text::Scorer;
use tokio::sync::Semaphore;

use crate::config::Config;
use crate::observe::unix_seconds;

pub(crate) use change::{Source, Swapped, change};
pub(crate) use file::{Spool, Stamp, TablesFileError, open};
pub(crate) use hot_swap::{Switched, Target, status, switch};
pub(crate) use upload::{read, receive};
pub(crate) use watch::watch;

/// Concurrent uploads. Each may take up `limits.table_bytes` on disk.
const UPLOADS: usize = 2;

/// Bounds on concurrent work.
pub(crate) struct Lanes {
    uploads: Semaphore,
    /// Reading, checking and preparing: a few times the size of the tables in memory.
    loads: Semaphore,
}

impl Lanes {
    pub(crate) fn new() -> Self {
        Self { uploads: Semaphore::new(UPLOADS), loads: Semaphore::new(1) }
    }
}

/// Tables that are or can be in use.
pub(crate) struct LoadedTables {
    pub(crate) tables: Arc<Tables>,
    /// T, prepared for summation.
    pub(crate) scorer: Arc<Scorer>,
    pub(crate) origin: Origin,
    /// Generation of the snapshot that introduced them; 1 until one does.
    pub(crate) generation: u64,
}

impl LoadedTables {
    /// Tables that are not in use yet.
    pub(crate) fn new(tables: Arc<Tables>, origin: Origin) -> Self {
        Self { scorer: Arc::new(Scorer::new(&tables)), tables, origin, generation: 1 }
    }
}

/// The origin of tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origin {
    /// The file, or `None` for an upload.
    pub(crate) path: Option<PathBuf>,
    /// The file's state when it was copied.
    pub(crate) stamp: Option<Stamp>,
}

/// Tables used earlier, without what only requests need.
#[derive(Clone)]
pub(crate) struct EarlierTables {
    pub(crate) tables: Arc<Tables>,
    pub(crate) origin: Origin,
    /// Generation of the snapshot that introduced them.
    pub(crate) generation: u64,
}

/// Why the last change of a backend's tables failed, until one succeeds.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub(crate) unix_seconds: u64,
    /// `file`, `upload`, `rollback`, `switch`, `watch` or `configuration`.
    pub(crate) by: &'static str,
    pub(crate) error: SharedError,
}

impl Trouble {
    pub(crate) fn now(by: &'static str, error: impl Into<SharedError>) -> Self {
        Self { unix_seconds: unix_seconds(), by, error: error.into() }
    }
}

/// Folder and size limit of copies.
pub(crate) fn spool(config: &Config) -> Spool {
    Spool { folder: config.tables.spool_dir.clone(), limit_bytes: config.limits.table_bytes as u64 }
}
