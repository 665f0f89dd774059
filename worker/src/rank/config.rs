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
use crate::ep::{ExpertLayout, ForcedRate, RankGroups, WireType};
use crate::unit::Shutdown;

/// Receives the events of a starting rank; each is meant to be printed as one line of JSON.
pub type Announce = Arc<dyn Fn(&WorkerEvent) + Send + Sync>;

/// Events that a rank announces, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum WorkerEvent {
    /// Rank 0 accepts registrations.
    Bound {
        /// The address for the other ranks to connect to.
        rendezvous: SocketAddr,
    },
    /// The rank has joined; for rank 0, the whole unit is ready and requests are served.
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

/// The configuration of one rank of a unit, or of several on one GPU. All ranks must be given the same model, world,
/// tables and attention.
#[derive(Clone)]
pub struct WorkerConfig {
    /// A Hugging Face checkpoint; the directory's name is the model's name.
    pub model_dir: PathBuf,
    /// This rank, below `world`.
    pub rank: u16,
    /// Number of ranks in the unit.
    pub world: u16,
    /// Rank 0 listens on this address (port 0: any), the others connect to it.
    pub rendezvous: SocketAddr,
    /// The compute device, and how many ranks this process runs.
    pub device: DeviceChoice,
    /// The GPU for [`DeviceChoice::Cuda`]; by default the driver's first.
    #[cfg(feature = "gpu")]
    pub gpu: Option<Arc<dyn GpuProvider>>,
    /// Folder that caches kernels compiled for the machine's GPU if this build has none for it; without it none are
    /// compiled.
    pub kernels: Option<PathBuf>,
    /// Layout of experts.
    pub experts: ExpertLayout,
    /// Expert domains: with whole experts and without tables, each rank holds the experts of all ranks of its domain.
    pub domains: Domains,
    /// Nodes of the unit, of neighbouring ranks, for counts by level; by default a node is the ranks that share memory.
    /// Hybrid experts define their own.
    pub nodes: Option<u16>,
    /// On exit, this rank writes the times of the stages of its last MoE layers to this file.
    pub stages: Option<PathBuf>,
    /// Capacity of every rank in whole experts per layer, so that it can switch to placements with more of them than
    /// the initial one.
    pub expert_slots: Option<u16>,
    /// Limit on the bytes of experts in this rank's memory; the others are streamed from the checkpoint.
    pub expert_memory: Option<u64>,
    /// The fraction of activations that is sent to the token's own rank, regardless of the router's choice: answers are
    /// wrong, and only step times are meaningful.
    pub force_local_rate: Option<ForcedRate>,
    /// How ranks exchange data.
    pub transport: TransportChoice,
    /// The element type of rows between ranks.
    pub wire: WireType,
    /// This rank's address for data links, if they use a separate network; by default rank 0 uses the rendezvous
    /// address, and the others the address from which they reach it.
    pub data_address: Option<IpAddr>,
    /// Ranks with different places share no memory, as if they were on several hosts.
    pub place: Option<String>,
    /// The secret by which ranks authenticate; required if the rendezvous or the data is not on a loopback address.
    pub secret: Option<Secret>,
    /// The token for admin routes; without one they are open if HTTP is served on a loopback address, and closed
    /// otherwise.
    pub admin_token: Option<Secret>,
    /// Rank 0's HTTP address (port 0: any); the others ignore it.
    pub listen: Option<SocketAddr>,
    /// Tables whose placement is used; contiguous placement without.
    pub tables: Option<PathBuf>,
    /// The folder that contains the tables for `/switch`; by default that of `tables`. Without either, no tables are
    /// accepted.
    pub tables_root: Option<PathBuf>,
    /// Layout of attention: each rank runs its own sequences, or every rank computes some heads of all sequences.
    pub attention: Attention,
    /// With attention tp: groups of neighbouring ranks, each with its own sequences.
    pub attention_groups: u16,
    /// Groups that the unit may be switched to, where attention may switch: each of neighbouring ranks that step by
    /// themselves, with all experts.
    pub switch_groups: Vec<u16>,
    /// Whether attention may switch while the unit serves: ranks then keep the weights of both layouts.
    pub both_attentions: bool,
    /// With attention tp: whether tables, if there are any, shuffle rows to ranks.
    pub shuffle: bool,
    /// Whether to stop at the end of standard input, when the parent process has exited or wants this one to stop.
    pub exit_on_stdin_eof: bool,
    /// Whether to stop at SIGTERM and SIGINT.
    pub handle_signals: bool,
    /// Another way to stop it, for programs that embed a rank.
    pub shutdown: Shutdown,
    /// Called when the rank is bound and ready.
    pub announce: Announce,
    /// Threads that share large computations; ranks may differ, results do not depend on it.
    pub threads: usize,
    /// CPUs to pin the threads to.
    pub cpus: Option<CpuList>,
    /// Limits of the engine.
    pub limits: EngineLimits,
    /// How long the ranks wait for each other at startup.
    pub rendezvous_timeout: Duration,
    /// How long one collective may take before a late rank counts as lost.
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
    /// A rank with defaults for everything that has one. Rank 0 also needs `listen`.
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
            switch_groups: Vec::new(),
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

    /// The groups that the unit may be switched to, without impossible ones, which `prepare` refuses.
    pub(super) fn groups(&self) -> Vec<RankGroups> {
        self.switch_groups.iter().filter_map(|&groups| RankGroups::new(groups, self.world)).collect()
    }

    /// The possible layouts of attention, the initial one first.
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
                "the {name} {ip} is not a loopback address, and without a secret any host could join: give one with --secret-file"
            ))),
            _ => Ok(()),
        }
    }
}

/// Omits the secret, and callbacks.
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
