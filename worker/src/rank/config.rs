//! The configuration of a rank, and the events that it announces.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use semmoe_tables::{Attention, Domains};
use serde::{Deserialize, Serialize};

use super::cpus::CpuList;
use super::device::{self, DeviceChoice};
use super::error::WorkerError;
#[cfg(feature = "gpu")]
use super::gpu::GpuProvider;
use crate::control::{Location, Secret, TransportChoice};
use crate::engine::EngineLimits;
use crate::ep::{ExpertLayout, ForcedRate, WireType};
use crate::unit::Shutdown;

/// Takes the events of a rank while it starts; each is meant to be printed as one line of JSON.
pub type Announce = Arc<dyn Fn(&WorkerEvent) + Send + Sync>;

/// Events that a rank announces, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// How to run one rank of a unit, or several on one GPU. All ranks must be given the same model, world, tables and
/// attention.
#[derive(Clone)]
pub struct WorkerConfig {
    /// A Hugging Face checkpoint; its last part is the model's name.
    pub model_dir: PathBuf,
    /// This rank, below `world`.
    pub rank: u16,
    /// Ranks in the unit.
    pub world: u16,
    /// Rank 0 listens here (port 0: any), the others connect to it.
    pub rendezvous: SocketAddr,
    /// The processor that computes, and how many ranks this process runs.
    pub device: DeviceChoice,
    /// The GPU of [`DeviceChoice::Cuda`]; without one the driver's first is opened.
    #[cfg(feature = "gpu")]
    pub gpu: Option<Arc<dyn GpuProvider>>,
    /// Folder that caches kernels compiled for the machine's GPU where this build holds none; without it none are
    /// compiled.
    pub kernels: Option<PathBuf>,
    /// How experts are divided among ranks.
    pub experts: ExpertLayout,
    /// Expert domains: with whole experts and without tables, each rank holds the experts of all ranks of its domain.
    pub domains: Domains,
    /// Nodes of the unit, neighbouring ranks on each, for counts by level; without it a node is the ranks that share
    /// memory. Hybrid experts have their own.
    pub nodes: Option<u16>,
    /// Where this rank writes, when it leaves, when the stages of its last MoE layers began and ended.
    pub stages: Option<PathBuf>,
    /// Whole experts of a layer for which every rank has room, so that it can be switched to placements with more of
    /// them than the first one has.
    pub expert_slots: Option<u16>,
    /// The most bytes of experts in this rank's memory; the others are streamed from the checkpoint.
    pub expert_memory: Option<u64>,
    /// The share of activations that is sent to the token's own rank, whatever the router chose: answers are wrong, and
    /// only the time of steps means something.
    pub force_local_rate: Option<ForcedRate>,
    /// How the ranks exchange.
    pub transport: TransportChoice,
    /// The element type of the rows that they send each other.
    pub wire: WireType,
    /// This rank's own address for data links, where they have a network of their own; without it rank 0 takes them
    /// where the rendezvous is, and the others at the address from which they reach it.
    pub data_address: Option<IpAddr>,
    /// Ranks that are given different places share no memory, as if they were on several hosts.
    pub place: Option<String>,
    /// The secret that ranks prove to each other; required if the rendezvous or the data is not on a loopback address.
    pub secret: Option<Secret>,
    /// The token for admin routes; without one they are open if HTTP is served on a loopback address, and closed
    /// otherwise.
    pub admin_token: Option<Secret>,
    /// Rank 0 serves HTTP here (port 0: any); the others ignore it.
    pub listen: Option<SocketAddr>,
    /// Tables whose placement is to be run; contiguous placement without.
    pub tables: Option<PathBuf>,
    /// The folder below which `/switch` may name tables; that of `tables` without. Without either it takes none.
    pub tables_root: Option<PathBuf>,
    /// How attention is parallel: each rank its own sequences, or every rank some heads of all of them.
    pub attention: Attention,
    /// With attention tp: groups of neighbouring ranks, each of which has sequences of its own.
    pub attention_groups: u16,
    /// Whether attention may change while the unit serves: ranks then keep the weights of both.
    pub both_attentions: bool,
    /// With attention tp: whether rows are shuffled to the ranks that the tables name, if there are tables.
    pub shuffle: bool,
    /// Whether to stop when standard input ends: the parent process is gone or wants this one to stop.
    pub exit_on_stdin_eof: bool,
    /// Whether to stop at SIGTERM and SIGINT.
    pub handle_signals: bool,
    /// Another way to make it stop, for programs that embed a rank.
    pub shutdown: Shutdown,
    /// Called when the rank is bound and ready.
    pub announce: Announce,
    /// Threads that compute large steps together; ranks may differ, results do not.
    pub threads: usize,
    /// Processors that they are kept on.
    pub cpus: Option<CpuList>,
    /// Limits of the engine.
    pub limits: EngineLimits,
    /// How long the ranks wait for each other at the start.
    pub rendezvous_timeout: Duration,
    /// How long one collective may take before the rank that is late counts as lost.
    pub collective_timeout: Duration,
    /// How long a prepared switch waits for its commit.
    pub prepared_timeout: Duration,
    /// How long running requests may continue after a request to stop.
    pub grace: Duration,
    /// How long rank 0 answers with the cause after a rank was lost, before it exits; `None`: until it is asked to
    /// stop.
    pub exit_after_loss: Option<Duration>,
}

impl WorkerConfig {
    /// A rank with defaults for everything that can have one. Rank 0 needs `listen` as well.
    pub fn new(model_dir: PathBuf, rank: u16, world: u16, rendezvous: SocketAddr) -> Self {
        Self {
            model_dir,
            rank,
            world,
            rendezvous,
            device: DeviceChoice::Cpu,
            #[cfg(feature = "gpu")]
            gpu: None,
            kernels: None,
            experts: ExpertLayout::default(),
            domains: Domains::NONE,
            nodes: None,
            stages: None,
            expert_slots: None,
            expert_memory: None,
            force_local_rate: None,
            transport: TransportChoice::default(),
            wire: WireType::default(),
            data_address: None,
            place: None,
            secret: None,
            admin_token: None,
            listen: None,
            tables: None,
            tables_root: None,
            attention: Attention::Dp,
            attention_groups: 1,
            both_attentions: false,
            shuffle: true,
            exit_on_stdin_eof: false,
            handle_signals: true,
            shutdown: Shutdown::default(),
            announce: Arc::new(|_| {}),
            threads: 1,
            cpus: None,
            limits: EngineLimits::default(),
            rendezvous_timeout: Duration::from_secs(60),
            collective_timeout: Duration::from_secs(30),
            prepared_timeout: Duration::from_secs(30),
            grace: Duration::from_secs(4),
            exit_after_loss: Some(Duration::from_secs(5)),
        }
    }

    pub(super) fn location(&self) -> Location<'_> {
        Location { rendezvous: self.rendezvous, data: self.data_address, place: self.place.as_deref() }
    }

    /// How attention may be divided, as at the start first.
    pub(super) fn attentions(&self) -> Vec<Attention> {
        let all = match self.attention {
            Attention::Dp => [Attention::Dp, Attention::Tp],
            Attention::Tp => [Attention::Tp, Attention::Dp],
        };
        all[..if self.both_attentions { 2 } else { 1 }].to_vec()
    }

    pub(super) fn check(&self) -> Result<(), WorkerError> {
        if self.rank >= self.world {
            let (rank, world) = (self.rank, self.world);
            return Err(WorkerError::arguments(format!("rank is {rank}, expected below the world size {world}")));
        }
        device::check(self)?;
        if self.rank == 0 && self.listen.is_none() {
            return Err(WorkerError::arguments("rank 0 needs an address to serve HTTP on"));
        }
        if let Some(cpus) = &self.cpus {
            cpus.check().map_err(WorkerError::arguments)?;
        }
        let named = [("rendezvous", Some(self.rendezvous.ip())), ("data address", self.data_address)];
        let open = named.into_iter().find_map(|(name, ip)| Some((name, ip.filter(|ip| !ip.is_loopback())?)));
        match open {
            Some((name, ip)) if self.world > 1 && self.secret.is_none() => Err(WorkerError::arguments(format!(
                "the {name} {ip} is no loopback address, and without a secret any host there could join: expected one"
            ))),
            _ => Ok(()),
        }
    }
}

/// Without the secret, and without what can be called.
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
