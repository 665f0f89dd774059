//! A Hugging Face MoE checkpoint on one rank: all of attention (or this rank's heads of it), and this rank's experts.
//!
//! | module | what |
//! |---|---|
//! | `config` | `config.json`, checked |
//! | `checkpoint` | safetensors files by memory map |
//! | `load` | tensors by name, checked against the configuration, packed |
//! | `weights` | the weights that a rank keeps: one block for all families |
//! | `step` | the input and the output of a step |
//! | `sampling` | draws a token at random |
//! | `forward` | a step through all layers |
//! | `backend` | the interface of compute backends: `cpu` on the host, `gpu` on a GPU |
//! | `slices` | a rank's heads with attention tp, and its part of every expert with experts tp |
//! | `rows` | attention tp: which rows go to which rank |
//! | `attention`, `kv`, `rope` | causal attention over one sequence's cache |
//! | `grouped`, `latent` | the two kinds of attention: how queries, keys and values are computed |
//! | `router`, `mlp` | the choice of experts; a dense layer, a shared expert |
//! | `expert` | the routed experts of a rank, in one buffer |
//! | `streamed` | experts that are read from the checkpoint ahead of their layer |
//! | `layout` | how attention and experts are divided over the ranks |
//! | `switch` | switches attention and experts to another layout while sequences run |
//! | `compute` | matrix products and element-wise functions |
//! | `probe` | intermediate results, for tests |

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

/// One rank's model: loaded once, stepped by one thread.
pub struct Model {
    config: Arc<ModelConfig>,
    layout: AttentionLayout,
    /// The layouts of attention that the rank may switch to: the other attention first.
    others: Vec<AttentionLayout>,
    /// Index of the layout that a switch is prepared for.
    next: usize,
    backend: Backend,
    /// Pool of sequences that share nothing.
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

    /// The CPU backend, if it is one.
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
    /// Loads `config.json` and the safetensors files of a model directory, and keeps the experts that `placement`
    /// assigns to this rank (group g is rank g), including its copies of replicated ones. Every tensor is checked, also
    /// those that other ranks keep.
    ///
    /// # Errors
    /// One sentence: a file that is missing, truncated or invalid; an unsupported architecture or setting; a tensor
    /// that is missing or has another shape or type; a placement for another model.
    pub fn load(model_dir: &Path, rank: RankId, placement: impl Into<ExpertCopies>) -> Result<Self, ModelError> {
        Self::load_divided(model_dir, rank, placement, ExpertLayout::Ep, Attention::Dp)
    }

    /// Loads a model directory with experts in any layout and attention under any plan. With [`ExpertLayout::Tp`] the
    /// rank keeps its slice of every expert, and only the placement's shape is used; with [`ExpertLayout::Hybrid`] it
    /// keeps its slice of its node's experts, and group g is node g.
    ///
    /// # Errors
    /// See [`Model::load`]; experts that cannot be cut into this many slices; heads that cannot be split over this
    /// many ranks.
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
        let at = Place { rank: rank.index(), world: room.layout.world(replicas.groups().into()) };
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

    /// Loads a model directory on a GPU, for a unit of such ranks: whole experts or slices of them, attention dp or tp.
    /// It has `settings.pages` pages, used by one pool at a time: its own ([`Model::new_sequence`]), or another of
    /// equal size.
    ///
    /// # Errors
    /// See [`Model::load_divided`]; features that only the CPU supports; too little GPU memory.
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
        let ExpertRoom { layout, slots, memory } = experts.into();
        let config = Arc::new(ModelConfig::load(model_dir)?);
        let at = Place { rank: link.rank(), world: link.world() };
        check_placement(&config, GroupId::new(layout.host(at.rank) as u16), &replicas)?;
        let refused = [
            (matches!(config.attention, AttentionKind::Latent(_)), LATENT),
            (layout.nodes().is_some(), "hybrid experts"),
            (memory.is_some(), error::STREAMED),
            (plan.group.is_some_and(|ranks| ranks != at.world), "attention in groups of ranks"),
            (!plan.groups.is_empty(), "groups of ranks that a unit can be switched to"),
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

    /// Cost of streaming experts since the start; `None` if all stay in memory.
    pub fn expert_fetches(&self) -> Option<ExpertFetches> {
        match &self.backend.cpu()?.experts {
            RankExperts::Resident(_) => None,
            RankExperts::Streamed(experts) => Some(experts.fetches()),
        }
    }

    /// Whether it computes on the host.
    pub(crate) fn is_on_host(&self) -> bool {
        self.backend.cpu().is_some()
    }

    /// The GPU's work since the start; `None` on the CPU.
    pub fn device_work(&self) -> Option<DeviceWork> {
        self.out.device
    }

    /// The shape of a sequence's cache on this rank, as far as it is in host memory.
    pub fn cache_shape(&self) -> CacheShape {
        *self.pool.shape()
    }

    /// An empty cache for a sequence that shares nothing, without a limit; see [`KvPool`] for others.
    pub fn new_sequence(&self) -> KvCache {
        self.pool.alone()
    }

    /// Runs some tokens of any number of sequences through all layers, in lockstep with the other ranks: two
    /// collectives per MoE layer, also for an empty step. With attention tp every rank has the same tokens of the same
    /// sequences, and each layer has two more collectives; which items want logits may differ. A token's logits and
    /// routes do not depend on the rest of the step, nor on how its sequence was chunked (bitwise).
    ///
    /// # Errors
    /// [`StepError::Item`] before anything happened; [`StepError::Transport`] when a rank failed, after which the
    /// caches of these items are unchanged.
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
        // With attention tp the ranks of a group have the same tokens, which count once.
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
