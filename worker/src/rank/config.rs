//! A rank's configuration, and the events that it announces.

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
use crate::ep::{ExpertLayout, ForcedRate, NodeLayout, RankGroups, SwitchTargets, WireType};
use crate::unit::Shutdown;

/// Receives the events of a starting rank; each should be printed as one line of JSON.
pub type Announce = Arc<dyn Fn(&WorkerEvent) + Send + Sync>;

/// Events that a rank announces, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum WorkerEvent {
    /// Rank 0 accepts registrations.
    Bound {
        /// The address that the other ranks connect to.
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

/// The configuration of one rank, or of several ranks on one GPU. All ranks of a unit must use the same model, world,
/// tables and attention.
#[derive(Clone)]
pub struct WorkerConfig {
    /// The directory of a Hugging Face checkpoint; its name is the model's name.
    pub model_dir: PathBuf,
    /// This rank, below `world`.
    pub rank: u16,
    /// Number of ranks in the unit.
    pub world: u16,
    /// The address that rank 0 listens on (port 0: any free port) and the other ranks connect to.
    pub rendezvous: SocketAddr,
    /// The compute device, and how many ranks this process runs.
    pub device: DeviceChoice,
    /// Index of the process's GPU among the visible ones. Default: the only visible GPU, or else the position of the
    /// process in the unit.
    pub gpu_index: Option<u16>,
    /// The GPU for [`DeviceChoice::Cuda`], in place of one of the driver's.
    #[cfg(feature = "gpu")]
    pub gpu: Option<Arc<dyn GpuProvider>>,
    /// Cache folder for kernels that are compiled for the machine's GPU if this build includes none for it. Without a
    /// folder, no kernels are compiled.
    pub kernels: Option<PathBuf>,
    /// Layout of experts.
    pub experts: ExpertLayout,
    /// Expert domains: each rank has the experts of all ranks in its domain. Domains require whole experts and no
    /// tables.
    pub domains: Domains,
    /// Number of nodes, each of consecutive ranks, for traffic counts by distance. By default, the ranks that share
    /// memory form a node. Hybrid experts define their own nodes.
    pub nodes: Option<u16>,
    /// The file to which this rank writes the stage times of its last MoE layers on exit.
    pub stages: Option<PathBuf>,
    /// Capacity of every rank in whole experts per layer, to allow switches to placements with more experts on a rank
    /// than the initial placement.
    pub expert_slots: Option<u16>,
    /// Limit on the bytes of experts in this rank's memory; all other experts are streamed from the checkpoint.
    pub expert_memory: Option<u64>,
    /// The fraction of activations routed to the token's own rank, regardless of the router's choice. The generated
    /// text is then wrong, and only step times are meaningful.
    pub force_local_rate: Option<ForcedRate>,
    /// How ranks exchange data.
    pub transport: TransportChoice,
    /// The element type of rows between ranks.
    pub wire: WireType,
    /// This rank's address for data links, if they use a separate network. By default, rank 0 uses the rendezvous
    /// address, and the other ranks use the address from which they reach it.
    pub data_address: Option<IpAddr>,
    /// Ranks with different places do not share memory, as if they were on different hosts.
    pub place: Option<String>,
    /// The secret with which ranks authenticate; required if the rendezvous or data address is not a loopback address.
    pub secret: Option<Secret>,
    /// The token for admin routes. Without a token, admin routes are open if HTTP is served on a loopback address, and
    /// closed otherwise.
    pub admin_token: Option<Secret>,
    /// Rank 0's HTTP address (port 0: any free port); other ranks ignore it.
    pub listen: Option<SocketAddr>,
    /// The tables whose placement is used; without tables, the placement is contiguous.
    pub tables: Option<PathBuf>,
    /// The folder that contains the tables for `/switch`; by default, the folder of `tables`. Without either, `/switch`
    /// accepts no tables.
    pub tables_root: Option<PathBuf>,
    /// Attention layout: each rank runs its own sequences, or every rank computes some heads for all sequences.
    pub attention: Attention,
    /// Under attention tp, the number of groups of consecutive ranks, each with its own sequences.
    pub attention_groups: u16,
    /// Group counts that the unit can switch to if attention can switch. Each group consists of consecutive ranks that
    /// step independently and have all experts.
    pub switch_groups: Vec<u16>,
    /// The hybrid nodes that the unit can switch to, or starts with and can leave. Tables are then for ranks in every
    /// layout.
    pub switch_hybrid: Option<NodeLayout>,
    /// Whether attention can switch while the unit is serving; ranks then store the weights for both layouts.
    pub both_attentions: bool,
    /// Under attention tp, whether the tables, if any, shuffle rows among ranks.
    pub shuffle: bool,
    /// Whether to stop at the end of standard input, which means that the parent process has exited or wants this one
    /// to stop.
    pub exit_on_stdin_eof: bool,
    /// Whether to stop at SIGTERM and SIGINT.
    pub handle_signals: bool,
    /// Another way to stop the rank, for programs that embed it.
    pub shutdown: Shutdown,
    /// Called when the rank is bound and ready.
    pub announce: Announce,
    /// Number of threads that share large computations. Ranks may use different numbers; results do not depend on it.
    pub threads: usize,
    /// The CPUs that the threads are pinned to.
    pub cpus: Option<CpuList>,
    /// Limits of the engine.
    pub limits: EngineLimits,
    /// How long the ranks wait for each other at startup.
    pub rendezvous_timeout: Duration,
    /// Time limit for one collective, after which a late rank is considered lost.
    pub collective_timeout: Duration,
    /// How long a prepared switch waits for its commit.
    pub prepared_timeout: Duration,
    /// How long running requests may continue after a stop request.
    pub grace: Duration,
    /// How long rank 0 keeps returning the cause after a rank was lost, before it exits; `None`: until it is asked to
    /// stop.
    pub exit_after_loss: Option<Duration>,
}

impl WorkerConfig {
    /// Creates a rank's configuration with defaults for everything else. Rank 0 also requires `listen`.
    pub fn new(model_dir: PathBuf, rank: u16, world: u16, rendezvous: SocketAddr) -> Self {
        Self {
            model_dir,
            rank,
            world,
            rendezvous,
            device: DeviceChoice::Cpu,
            gpu_index: None,
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
            switch_hybrid: None,
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

    /// Returns the layouts that the unit can switch to, skipping invalid groups, which `prepare` rejects.
    pub(super) fn targets(&self) -> SwitchTargets {
        let groups = self.switch_groups.iter().filter_map(|&groups| RankGroups::new(groups, self.world)).collect();
        SwitchTargets { groups, hybrid: self.switch_hybrid }
    }

    /// Returns the number of groups of this unit's placements: its ranks, or its nodes if experts stay hybrid.
    pub(super) fn placement_groups(&self) -> u16 {
        match self.switch_hybrid {
            Some(_) => self.world,
            None => self.experts.hosts(self.world.into()) as u16,
        }
    }

    /// Returns the possible attention layouts, initial layout first.
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
                "the {name} {ip} is not a loopback address, so any host could join without a secret: set one with --secret-file"
            ))),
            _ => Ok(()),
        }
    }
}

/// Omits secrets and callbacks from the output.
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
