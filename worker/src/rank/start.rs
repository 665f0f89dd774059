//! Sets up collectives, model and engine once the unit has formed.

use std::io::{self, BufWriter};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use semmoe_kernels::Element;
use semmoe_kernels::collectives::{Collectives, PrivateMemory, RowMemory, StageObserver, Unobserved};
use semmoe_tables::RankId;

use super::config::WorkerConfig;
use super::cpus::CpuList;
#[cfg(feature = "gpu")]
use super::device::DeviceChoice;
use super::error::WorkerError;
#[cfg(feature = "gpu")]
use super::gpu;
use super::prepare::{Prepared, StageFile};
use crate::control::Ends;
use crate::engine::{Emit, Engine, EngineEnd, Inbox, UnitLimits};
use crate::ep::{
    ExpertParallel, LocalTransport, Lockstep, ShmTransport, StageLog, SwitchableRows, TcpTransport, UnitError,
    WireRows, WireType,
};
#[cfg(feature = "gpu")]
use crate::model::gpu::GpuLink;
use crate::model::{AttentionPlan, ExpertMemory, ExpertRoom, Model, instructions, with_threads};
use crate::unit::Lost;

/// A rank that is connected but has no model yet. Commands can already be sent to it.
pub(super) struct Connected {
    ep: ExpertParallel,
    /// The ranks that share memory with this rank.
    near: Vec<usize>,
    pub(super) inbox: Inbox,
    /// The transport between the ranks.
    pub(super) transport: &'static str,
    stages: Option<StageFile>,
    /// Set only for ranks on GPUs.
    #[cfg(feature = "gpu")]
    link: Option<GpuLink>,
}

/// Takes ownership of the data links and of the shared memory, if the ranks use it.
pub(super) fn connect(config: &WorkerConfig, prepared: &Prepared, ends: Ends) -> Result<Connected, WorkerError> {
    let (transport, wire) = (ends.transport(), config.wire);
    let stages = prepared.stages.clone();
    let near = ends.memory.as_ref().map(|shared| shared.ranks.clone()).unwrap_or_default();
    let node = prepared.node.clone().map_or_else(|| near.clone(), |node| node.collect());
    let log = stages.as_ref().map(|file| file.log.clone());
    #[cfg(feature = "gpu")]
    let mut link = None;
    let unit = match (config.device, wire) {
        #[cfg(feature = "gpu")]
        (DeviceChoice::Cuda { dtype, .. }, _) => {
            let (joined, rows) = gpu::join(config, dtype, ends)?;
            link = Some(joined);
            Ok(rows.into())
        }
        (_, WireType::F32) => ends.join(WireRows::f32, config, log.clone()),
        (_, WireType::Bf16) => ends.join(WireRows::bf16, config, log.clone()),
    };
    let unit = unit.map_err(WorkerError::Runtime)?;
    tracing::info!(rank = config.rank, transport, %wire, "the rank is connected");
    let mut ep = ExpertParallel::over(unit, &prepared.placement, config.experts)
        .map_err(WorkerError::arguments)?
        .with_neighbours(node)
        .with_attention_groups(config.attention_groups.into());
    (ep.stages, ep.forced) = (log, config.force_local_rate);
    let inbox = Inbox::new(ep.waker());
    Ok(Connected {
        ep,
        near,
        inbox,
        transport,
        stages,
        #[cfg(feature = "gpu")]
        link,
    })
}

impl Ends {
    fn transport(&self) -> &'static str {
        match &self.memory {
            _ if self.data.len() == 1 => "local",
            Some(shared) if shared.ranks.len() == self.data.len() => "shm",
            Some(_) => "mixed",
            None => "tcp",
        }
    }

    /// Creates only the link, without row collectives.
    #[cfg(feature = "gpu")]
    pub(super) fn link(self, config: &WorkerConfig) -> io::Result<Box<dyn Lockstep>> {
        let (rank, limit) = (usize::from(config.rank), config.collective_timeout);
        Ok(match self.memory {
            _ if self.data.len() == 1 => Box::new(LocalTransport::mesh(1).remove(0)),
            Some(shared) if shared.ranks.len() == self.data.len() => {
                Box::new(ShmTransport::new::<f32>(rank, shared.memory, self.data, limit)?.0)
            }
            _ => Box::new(TcpTransport::new(rank, self.data, limit)?),
        })
    }

    fn join<T: Element>(
        self,
        wire: fn(Box<dyn Collectives<T>>) -> WireRows,
        config: &WorkerConfig,
        stages: Option<StageLog>,
    ) -> io::Result<SwitchableRows> {
        let (rank, limit) = (usize::from(config.rank), config.collective_timeout);
        let private = || PrivateMemory::new(rank);
        let observer: Box<dyn StageObserver + Send> = match stages {
            Some(log) => Box::new(log),
            None => Box::new(Unobserved),
        };
        let unit = match self.memory {
            _ if self.data.len() == 1 => {
                join_over(config, wire, LocalTransport::mesh(1).remove(0), private(), observer)
            }
            Some(shared) if shared.ranks.len() == self.data.len() => {
                let (link, rows) = ShmTransport::new(rank, shared.memory, self.data, limit)?;
                join_over(config, wire, link, rows, observer)
            }
            // A rank that also waits for ranks on other hosts must poll sockets, so only rows use the shared memory.
            Some(shared) => {
                let rows = Arc::new(shared.memory).rows(rank, &shared.ranks, self.data.len());
                join_over(config, wire, TcpTransport::new(rank, self.data, limit)?, rows, observer)
            }
            None => join_over(config, wire, TcpTransport::new(rank, self.data, limit)?, private(), observer),
        };
        unit.map_err(io::Error::other)
    }
}

/// Creates the collectives over a link, in all layouts that the unit can have.
fn join_over<T: Element>(
    config: &WorkerConfig,
    wire: fn(Box<dyn Collectives<T>>) -> WireRows,
    link: impl Lockstep + 'static,
    rows: impl RowMemory<T> + 'static,
    observer: Box<dyn StageObserver + Send>,
) -> Result<SwitchableRows, UnitError> {
    let targets = config.targets();
    if targets.is_empty() {
        let groups = config.attention_groups.into();
        return config.experts.join_grouped(groups, wire, link, rows, observer).map(Into::into);
    }
    SwitchableRows::join(&targets, wire, link, rows, observer)
}

/// Loads the rank's model on the host.
fn load(config: &WorkerConfig, prepared: &Prepared) -> Result<Model, WorkerError> {
    let rank = RankId::new(config.rank);
    let memory = config.expert_memory.map(ExpertMemory::Bytes);
    let (layout, slots, hybrid) = (config.experts, config.expert_slots, config.switch_hybrid);
    let experts = ExpertRoom { layout, slots, memory, hybrid };
    let attention = attention_plan(config, prepared);
    Ok(Model::load_divided(&prepared.served.dir, rank, &prepared.placement, experts, attention)?)
}

/// Returns the rank's attention plan.
fn attention_plan(config: &WorkerConfig, prepared: &Prepared) -> AttentionPlan {
    let (group, tables) = (Some((config.world / config.attention_groups).into()), prepared.shuffle.clone());
    let groups = config.targets().groups.iter().map(|groups| groups.ranks.into()).collect();
    AttentionPlan { start: config.attention, both: config.both_attentions, group, groups, tables }
}

impl Connected {
    /// Loads the model and starts the engine on its own thread. `ended` is called with the way in which the engine
    /// ended, or with the failed rank, which is this one if the engine panicked. The returned handle keeps the
    /// transport open, because peers may still be finishing a step when this rank has left its loop.
    pub(super) fn start(
        self,
        config: &WorkerConfig,
        prepared: &Prepared,
        limits: UnitLimits,
        emit: Emit,
        ended: impl FnOnce(Result<EngineEnd, Lost>) + Send + 'static,
    ) -> Result<JoinHandle<Engine>, WorkerError> {
        let rank = RankId::new(config.rank);
        #[cfg_attr(not(feature = "gpu"), expect(unused_mut, reason = "only ranks on a GPU exchange addresses first"))]
        let mut ep = self.ep;
        #[cfg(feature = "gpu")]
        let mut model = match self.link {
            None => load(config, prepared)?,
            Some(link) => gpu::load(config, prepared, limits, attention_plan(config, prepared), link, &mut ep)?,
        };
        #[cfg(not(feature = "gpu"))]
        let mut model = load(config, prepared)?;
        let (threads, cpus) = (config.threads, config.cpus.clone());
        model.share_experts(&self.near);
        tracing::info!(%rank, instructions = instructions(), threads, "the model is loaded");
        let stages = self.stages;
        let mut engine = Engine::new(model, ep, Arc::clone(&prepared.served.tokenizer), limits, self.inbox, emit);
        engine.affinity = prepared.affinity.clone();
        let work = move || {
            if let Some(Err(error)) = cpus.as_ref().map(CpuList::pin) {
                // The CPUs were available to this process at startup.
                tracing::warn!(%error, "the rank's threads are not pinned");
            }
            // A panic is a bug, but the unit must still learn which rank failed.
            let lost = |cause: &str| Lost { rank, cause: format!("rank {rank} was lost: {cause}") };
            let end = match catch_unwind(AssertUnwindSafe(|| with_threads(threads, || engine.run()))) {
                Ok(Ok(Ok(end))) => Ok(end),
                Ok(Err(error)) => Err(lost(&format!("it could not start threads: {error}"))),
                Ok(Ok(Err(error))) => Err(Lost { rank: RankId::new(error.rank() as u16), cause: error.to_string() }),
                Err(_) => Err(lost("its engine panicked")),
            };
            // Write the stages before reporting the end, because the process may then exit.
            if let Some(StageFile { path, file, log }) = stages
                && let Err(error) = log.write(BufWriter::new(&*file))
            {
                tracing::warn!(%error, "cannot write the stages to {}", path.display());
            }
            ended(end);
            engine
        };
        std::thread::Builder::new().name(format!("rank-{rank}")).spawn(work).map_err(WorkerError::Runtime)
    }
}
