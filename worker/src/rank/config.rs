//! What a rank is started with and what it announces.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::error::WorkerError;
use crate::engine::EngineLimits;
use crate::unit::Shutdown;

/// Takes what a rank announces while it starts; each is meant to be printed as one line of JSON.
pub type Announce = Box<dyn FnMut(&WorkerEvent) + Send>;

/// What a rank announces, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum WorkerEvent {
    /// Rank 0 takes registrations.
    Bound {
        /// Where the other ranks have to connect to.
        rendezvous: SocketAddr,
    },
    /// The rank takes part; for rank 0, the whole unit is ready and requests are served.
    Ready {
        /// The rank.
        rank: u16,
        /// Its process.
        pid: u32,
        /// Rank 0's HTTP address.
        #[serde(skip_serializing_if = "Option::is_none")]
        http: Option<SocketAddr>,
    },
}

/// How to run one rank of a unit. All ranks must be given the same model, world and tables.
pub struct WorkerConfig {
    /// A Hugging Face checkpoint; its last part is the model's name.
    pub model_dir: PathBuf,
    /// This rank, below `world`.
    pub rank: u16,
    /// Ranks in the unit.
    pub world: u16,
    /// Rank 0 listens here (port 0: any), the others connect to it.
    pub rendezvous: SocketAddr,
    /// Rank 0 serves HTTP here (port 0: any); the others ignore it.
    pub listen: Option<SocketAddr>,
    /// Tables whose placement is to be run; contiguous placement without.
    pub tables: Option<PathBuf>,
    /// Whether to stop when standard input ends: the parent process is gone or wants it.
    pub exit_on_stdin_eof: bool,
    /// Whether to stop at SIGTERM and SIGINT.
    pub handle_signals: bool,
    /// Another way to make it stop, for programs that embed a rank.
    pub shutdown: Shutdown,
    /// Told when the rank is bound and ready.
    pub announce: Announce,
    /// What the engine holds and does at most.
    pub limits: EngineLimits,
    /// How long the ranks wait for each other at the start.
    pub rendezvous_timeout: Duration,
    /// How long one collective may take before the rank that is late counts as lost.
    pub collective_timeout: Duration,
    /// How long running requests may go on after the wish to stop.
    pub grace: Duration,
}

impl WorkerConfig {
    /// A rank with defaults for everything that can have one. Rank 0 needs `listen` as well.
    #[must_use]
    pub fn new(model_dir: PathBuf, rank: u16, world: u16, rendezvous: SocketAddr) -> Self {
        Self {
            model_dir,
            rank,
            world,
            rendezvous,
            listen: None,
            tables: None,
            exit_on_stdin_eof: false,
            handle_signals: true,
            shutdown: Shutdown::default(),
            announce: Box::new(|_| {}),
            limits: EngineLimits::default(),
            rendezvous_timeout: Duration::from_secs(60),
            collective_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(4),
        }
    }

    pub(super) fn check(&self) -> Result<(), WorkerError> {
        if self.rank >= self.world {
            let detail = format!("rank is {}, expected below the world size {}", self.rank, self.world);
            return Err(WorkerError::Arguments { detail });
        }
        if self.rank == 0 && self.listen.is_none() {
            let detail = "rank 0 needs an address to serve HTTP on".to_owned();
            return Err(WorkerError::Arguments { detail });
        }
        Ok(())
    }
}

impl fmt::Debug for WorkerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerConfig")
            .field("model_dir", &self.model_dir)
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("rendezvous", &self.rendezvous)
            .field("tables", &self.tables)
            .finish_non_exhaustive()
    }
}
