//! Backends' tables while the gateway runs.
//!
//! | part | purpose |
//! |---|---|
//! | `file` | an external file: opened once and copied; the copy is mapped |
//! | `upload` | a request body, copied and mapped likewise |
//! | `change` | load, check, swap; on a failure the old tables stay in use, and the reason is recorded |
//! | `hot_swap` | a worker moves its experts to the placement of new tables, which are then swapped in |
//! | `watch` | configured files that changed |
//!
//! All of it runs off the network threads, one load at a time. Requests finish with the tables they began with and take
//! no lock; later requests use the next snapshot.

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

/// Maximum number of concurrent uploads. Each may occupy up to `limits.table_bytes` on disk.
const UPLOADS: usize = 2;

/// Bounds on concurrent work.
pub(crate) struct Lanes {
    uploads: Semaphore,
    /// Reading, checking and preparing tables, which needs several times their size in memory.
    loads: Semaphore,
}

impl Lanes {
    pub(crate) fn new() -> Self {
        Self { uploads: Semaphore::new(UPLOADS), loads: Semaphore::new(1) }
    }
}

/// Tables that are in use, or ready for use.
pub(crate) struct LoadedTables {
    pub(crate) tables: Arc<Tables>,
    /// T, prepared for summation.
    pub(crate) scorer: Arc<Scorer>,
    pub(crate) origin: Origin,
    /// Generation of the snapshot that introduced the tables; 1 until one does.
    pub(crate) generation: u64,
}

impl LoadedTables {
    /// Wraps tables that are not in use yet.
    pub(crate) fn new(tables: Arc<Tables>, origin: Origin) -> Self {
        Self { scorer: Arc::new(Scorer::new(&tables)), tables, origin, generation: 1 }
    }
}

/// The origin of tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origin {
    /// The file's path, or `None` for an upload.
    pub(crate) path: Option<PathBuf>,
    /// The file's state when it was copied.
    pub(crate) stamp: Option<Stamp>,
}

/// Previously used tables, without the parts that only requests need.
#[derive(Clone)]
pub(crate) struct EarlierTables {
    pub(crate) tables: Arc<Tables>,
    pub(crate) origin: Origin,
    /// Generation of the snapshot that introduced the tables.
    pub(crate) generation: u64,
}

/// Why the last change of a backend's tables failed; cleared by the next successful change.
#[derive(Clone, Debug)]
pub(crate) struct Trouble {
    pub(crate) unix_seconds: u64,
    /// The trigger: `file`, `upload`, `rollback`, `switch`, `watch` or `configuration`.
    pub(crate) by: &'static str,
    pub(crate) error: SharedError,
}

impl Trouble {
    pub(crate) fn now(by: &'static str, error: impl Into<SharedError>) -> Self {
        Self { unix_seconds: unix_seconds(), by, error: error.into() }
    }
}

/// Returns the folder and size limit for copies.
pub(crate) fn spool(config: &Config) -> Spool {
    Spool { folder: config.tables.spool_dir.clone(), limit_bytes: config.limits.table_bytes as u64 }
}
