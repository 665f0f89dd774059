//! One rank's part of a Hugging Face MoE checkpoint: the attention weights (all heads or a slice) and the rank's
//! experts.
//!
//! | module | what |
//! |---|---|
//! | `config` | parses and checks `config.json` |
//! | `checkpoint` | memory-maps safetensors files |
//! | `load` | looks up tensors by name, checks them against the configuration and packs them |
//! | `weights` | the weights that a rank stores: one block type for all model families |
//! | `step` | the input and output of a step |
//! | `sampling` | random sampling of tokens |
//! | `forward` | runs a step through all layers |
//! | `backend` | the compute backend interface: `cpu` on the host, `gpu` on a GPU |
//! | `slices` | a rank's heads with attention tp, and its slice of every expert with experts tp |
//! | `rows` | attention tp: assigns rows to ranks |
//! | `attention`, `kv`, `rope` | causal attention over one sequence's KV cache |
//! | `grouped`, `latent` | the two attention kinds: how queries, keys and values are computed |
//! | `router`, `mlp` | expert selection; dense layers and shared experts |
//! | `expert` | a rank's routed experts, in one buffer |
//! | `streamed` | experts streamed from the checkpoint, ahead of their layer |
//! | `layout` | how attention and experts are divided over the ranks |
//! | `switch` | switches attention and experts to another layout while sequences are running |
//! | `compute` | matrix products and element-wise functions |
//! | `probe` | exposes intermediate results to tests and recordings |

mod attention;
mod backend;
mod checkpoint;
mod compute;
mod config;
mod cpu;
mod error;
mod expert;
mod forward;
#[cfg(feature = "gpu")]
pub mod gpu;
mod grouped;
mod kv;
mod latent;
mod layout;
mod load;
mod mlp;
mod probe;
mod rope;
mod router;
mod rows;
mod sampling;
mod slices;
mod step;
mod streamed;
mod switch;
mod weights;

use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "gpu")]
use semmoe_kernels::Dtype;
#[cfg(feature = "gpu")]
use semmoe_kernels_cuda::unit::UnitRank;
use semmoe_tables::{Attention, ExpertCopies, GroupId, RankId};

pub(crate) use checkpoint::read_small_file;
pub(crate) use compute::instructions;
pub(crate) use config::token_ids;
pub use config::{
    Architecture, AttentionKind, GroupLimit, GroupScore, GroupedAttention, HeadNormKind, LatentAttention, ModelConfig,
    Rope, RopeLayout, Router, Scoring, SharedExpert, Yarn,
};
pub(crate) use error::LATENT;
pub use error::{ItemError, ModelError, StepError};
pub(crate) use kv::KvSpan;
pub use kv::{
    AttentionSwitch, CacheShape, KvArrival, KvCache, KvObjection, KvPhase, KvPool, KvUsage, MovingSequence,
    PAGE_TOKENS, PreparedKv,
};
pub use layout::{AttentionPlan, AttentionShape, ExpertMemory, ExpertRoom};
pub use probe::Probe;
pub(crate) use sampling::Candidate;
pub use sampling::Draw;
pub use slices::HeadSlice;
pub(crate) use slices::expert_columns;
pub use step::{DeviceWork, Next, StepItem, StepOutput, Wants, likeliest};
pub use streamed::ExpertFetches;
pub(crate) use streamed::check_expert_memory;
pub(crate) use switch::allgather_messages;
pub use switch::{Objection, Refusal, SwitchFault, SwitchOutcome};

use crate::ep::{ExpertLayout, ExpertParallel, ExpertPlacement};
pub use crate::threads::with_threads;
use backend::ComputeBackend;
use checkpoint::Checkpoint;
use cpu::CpuBackend;
use expert::Place;
use forward::{Forward, Scratch};
use layout::AttentionLayout;
use streamed::RankExperts;

/// One rank's model, loaded once and stepped by a single thread.
pub struct Model {
    config: Arc<ModelConfig>,
    layout: AttentionLayout,
    /// Attention layouts that the rank can switch to: the other of dp and tp first, if loaded, then tp in groups.
    others: Vec<AttentionLayout>,
    /// Index in `others` of the layout for which a switch is being prepared.
    next: usize,
    backend: Backend,
    /// KV pool for sequences without prefix sharing.
    pool: KvPool,
    scratch: Scratch,
    out: StepOutput,
}

/// The compute backend.
enum Backend {
    Cpu(Box<CpuBackend>),
    #[cfg(feature = "gpu")]
    Gpu(Box<dyn gpu::DeviceBackend>),
}

impl Backend {
    fn compute(&mut self) -> &mut dyn ComputeBackend {
        match self {
            Self::Cpu(cpu) => &mut **cpu,
            #[cfg(feature = "gpu")]
            Self::Gpu(gpu) => &mut **gpu,
        }
    }

    /// Returns the CPU backend, or `None` on a GPU.
    fn cpu(&self) -> Option<&CpuBackend> {
        match self {
            Self::Cpu(cpu) => Some(cpu),
            #[cfg(feature = "gpu")]
            Self::Gpu(_) => None,
        }
    }

    fn cpu_mut(&mut self) -> Option<&mut CpuBackend> {
        match self {
            Self::Cpu(cpu) => Some(cpu),
            #[cfg(feature = "gpu")]
            Self::Gpu(_) => None,
        }
    }
}

impl Model {
    /// Loads `config.json` and the safetensors files of a model directory, and packs the experts that `placement`
    /// assigns to this rank (group g is rank g), including replicas. Every tensor is checked, even those that only
    /// other ranks use.
    ///
    /// # Errors
    /// Fails if a file is missing, truncated or invalid, the architecture or a setting is unsupported, a tensor is
    /// missing or has the wrong shape or type, or the placement belongs to another model. Each error is one sentence.
    pub fn load(model_dir: &Path, rank: RankId, placement: impl Into<ExpertCopies>) -> Result<Self, ModelError> {
        Self::load_divided(model_dir, rank, placement, ExpertLayout::Ep, Attention::Dp)
    }

    /// Loads a model directory with any expert layout and attention plan. With [`ExpertLayout::Tp`] the rank loads its
    /// slice of every expert, and only the placement's dimensions are used. With [`ExpertLayout::Hybrid`] it loads its
    /// slice of its node's experts, and group g is node g, or rank g with [`ExpertRoom::hybrid`].
    ///
    /// # Errors
    /// See [`Model::load`]. Also fails if the experts cannot be divided into this many slices, or the heads cannot be
    /// split over this many ranks.
    pub fn load_divided(
        model_dir: &Path,
        rank: RankId,
        placement: impl Into<ExpertCopies>,
        experts: impl Into<ExpertRoom>,
        attention: impl Into<AttentionPlan>,
    ) -> Result<Self, ModelError> {
        let (replicas, room) = (placement.into(), experts.into());
        let config = Arc::new(ModelConfig::load(model_dir)?);
        check_placement(&config, GroupId::new(room.layout.host(rank.index()) as u16), &replicas)?;
        let groups = usize::from(replicas.groups());
        let world = if room.hybrid.is_some() { groups } else { room.layout.world(groups) };
        let at = Place { rank: rank.index(), world };
        expert_columns(&config, room.layout, at.rank, at.world)?;
        let plan: AttentionPlan = attention.into();
        let (layout, others, slices) = AttentionLayout::all(&config, at, &plan)?;
        let (checkpoint, placement) = (Checkpoint::open(model_dir)?, ExpertPlacement { layout: room.layout, replicas });
        let cpu = CpuBackend::load(&checkpoint, &config, at, &slices, &placement, room, &plan.groups)?;
        let pool = KvPool::new(layout.heads.cache_shape(&config), usize::MAX, false);
        Ok(Self::of(config, layout, others, Backend::Cpu(Box::new(cpu)), pool))
    }

    fn of(
        config: Arc<ModelConfig>,
        layout: AttentionLayout,
        others: Vec<AttentionLayout>,
        backend: Backend,
        pool: KvPool,
    ) -> Self {
        let (scratch, out) = (Scratch::default(), StepOutput::default());
        Self { config, layout, others, next: 0, backend, pool, scratch, out }
    }

    /// Loads a model directory onto a GPU, for a unit whose ranks all run on GPUs. Experts are whole or sliced,
    /// attention is dp or tp. The cache has `settings.pages` pages, which only one pool may use at a time: the model's
    /// own ([`Model::new_sequence`]) or another one of the same size.
    ///
    /// # Errors
    /// See [`Model::load_divided`]. Also fails if a feature is CPU-only or GPU memory is insufficient.
    #[cfg(feature = "gpu")]
    pub fn load_on(
        model_dir: &Path,
        placement: impl Into<ExpertCopies>,
        experts: impl Into<ExpertRoom>,
        attention: impl Into<AttentionPlan>,
        settings: gpu::GpuSettings,
        rank: UnitRank,
        link: gpu::GpuLink,
    ) -> Result<Self, ModelError> {
        use crate::ep::Lockstep as _;
        let (replicas, plan) = (placement.into(), attention.into());
        let ExpertRoom { layout, slots, memory, hybrid } = experts.into();
        let config = Arc::new(ModelConfig::load(model_dir)?);
        let at = Place { rank: link.rank(), world: link.world() };
        check_placement(&config, GroupId::new(layout.host(at.rank) as u16), &replicas)?;
        let refused = [
            (matches!(config.attention, AttentionKind::Latent(_)), LATENT),
            (layout.nodes().or(hybrid).is_some(), "hybrid experts"),
            (memory.is_some(), error::STREAMED),
            (plan.group.is_some_and(|ranks| ranks != at.world), "attention tp in rank groups"),
            (!plan.groups.is_empty(), "switching to rank groups (--switch-groups)"),
        ];
        if let Some((_, what)) = refused.into_iter().find(|(refused, _)| *refused) {
            return Err(ModelError::NotOnGpu(what));
        }
        let (checkpoint, placement) = (&Checkpoint::open(model_dir)?, &ExpertPlacement { layout, replicas });
        let (layout, others, slices) = AttentionLayout::all(&config, at, &plan)?;
        let load = gpu::GpuLoad { checkpoint, config: &config, at, slices: &slices, placement, slots, settings };
        let backend: Box<dyn gpu::DeviceBackend> = match settings.dtype {
            Dtype::F32 => Box::new(gpu::GpuBackend::<f32>::load(&load, rank, link)?),
            Dtype::Bf16 => Box::new(gpu::GpuBackend::<half::bf16>::load(&load, rank, link)?),
            Dtype::F16 => return Err(ModelError::NotOnGpu("f16")),
        };
        let pool = KvPool::new(layout.heads.cache_shape(&config).elsewhere(), settings.pages, false);
        Ok(Self::of(config, layout, others, Backend::Gpu(backend), pool))
    }

    /// The checkpoint's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns expert streaming statistics since startup, or `None` if all experts are resident.
    pub fn expert_fetches(&self) -> Option<ExpertFetches> {
        match &self.backend.cpu()?.experts {
            RankExperts::Resident(_) => None,
            RankExperts::Streamed(experts) => Some(experts.fetches()),
        }
    }

    /// Whether the model runs on the CPU.
    pub(crate) fn is_on_host(&self) -> bool {
        self.backend.cpu().is_some()
    }

    /// Returns the GPU's work counters since startup, or `None` on the CPU.
    pub fn device_work(&self) -> Option<DeviceWork> {
        self.out.device
    }

    /// Returns the shape of the part of a sequence's cache that this rank stores in host memory.
    pub fn cache_shape(&self) -> CacheShape {
        *self.pool.shape()
    }

    /// Creates an empty cache for a sequence without prefix sharing, from the model's own pool. On the CPU that pool is
    /// unbounded; for bounded or shared caches use a [`KvPool`].
    pub fn new_sequence(&self) -> KvCache {
        self.pool.alone()
    }

    /// Runs tokens of any number of sequences through all layers, in lockstep with the other ranks: every MoE layer
    /// takes two collectives, even in an empty step. With attention tp, all ranks of a group must pass the same tokens
    /// of the same sequences (they may request output for different items), and each layer takes two more collectives.
    /// A token's logits and routes are bitwise independent of the rest of the step and of how its sequence was chunked.
    ///
    /// # Errors
    /// [`StepError::Item`] if an item is invalid, before any computation; [`StepError::Transport`] if a rank failed, in
    /// which case the caches of these items are unchanged.
    pub fn step(&mut self, items: &mut [StepItem<'_>], ep: &mut ExpertParallel) -> Result<&StepOutput, StepError> {
        self.step_probed(items, ep, &mut ())
    }

    /// Runs [`Model::step`] and passes intermediate results to `probe`.
    ///
    /// # Errors
    /// See [`Model::step`].
    pub fn step_probed(
        &mut self,
        items: &mut [StepItem<'_>],
        ep: &mut ExpertParallel,
        probe: &mut dyn Probe,
    ) -> Result<&StepOutput, StepError> {
        for (item, step) in items.iter().enumerate() {
            check_item(&self.config, step).map_err(|source| StepError::Item { item, source })?;
        }
        for (item, step) in items.iter_mut().enumerate() {
            if !step.kv.reserve(step.tokens.len()) {
                return Err(StepError::Item { item, source: ItemError::NoPage });
            }
        }
        let mut forward = Forward {
            config: &self.config,
            backend: self.backend.compute(),
            scratch: &mut self.scratch,
            out: &mut self.out,
            ep,
            rows: self.layout.rows.as_mut(),
            probe,
        };
        forward.run(items)?;
        // With attention tp, all ranks of a group process the same tokens, so only the first one counts them.
        let counts = self.layout.rows.is_none() || ep.attention_place() == 0;
        for (item, rows) in items.iter_mut().zip(self.out.offsets.windows(2)) {
            let width = self.out.route_width;
            item.kv.commit(item.tokens, &self.out.routes[rows[0] * width..rows[1] * width]);
            if counts {
                ep.counters.add_tokens(item.phase, item.tokens.len());
            }
        }
        Ok(&self.out)
    }
}

fn check_item(config: &ModelConfig, item: &StepItem<'_>) -> Result<(), ItemError> {
    if item.tokens.is_empty() {
        return Err(ItemError::NoTokens);
    }
    let limit = config.vocab_size;
    if let Some(&found) = item.tokens.iter().find(|&&token| token as usize >= limit) {
        return Err(ItemError::Token { found, limit });
    }
    let (found, limit) = (item.tokens.len(), item.kv.remaining());
    if found <= limit { Ok(()) } else { Err(ItemError::Length { found, limit }) }
}

fn check_placement(config: &ModelConfig, host: GroupId, placement: &ExpertCopies) -> Result<(), ModelError> {
    let check = |field, found: usize, of, expected: usize| match found == expected {
        true => Ok(()),
        false => Err(ModelError::Placement { field, found, of, expected }),
    };
    check("MoE layers", placement.layers(), "model", config.num_moe_layers())?;
    check("experts per layer", usize::from(placement.experts()), "model", config.num_experts)?;
    let (groups, host) = (usize::from(placement.groups()), usize::from(host.get()));
    if host < groups { Ok(()) } else { check("groups", groups, "unit", host + 1) }
}
