//! GPU support for the ranks of this process, which share one GPU.

use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::Mutex;
#[cfg(feature = "cuda")]
use std::time::Duration;

use half::bf16;
use semmoe_kernels::Dtype;
use semmoe_kernels::collectives::{Lockstep as _, PrivateMemory, RowCollectives, UnitLink};
use semmoe_kernels_cuda::GpuError;
#[cfg(feature = "cuda")]
use semmoe_kernels_cuda::driver::{DeviceUnit, visible_devices};
use semmoe_kernels_cuda::unit::{LocalRank, Room};

use super::config::WorkerConfig;
use super::device::DeviceChoice;
#[cfg(feature = "cuda")]
use super::device::gpu_index;
use super::error::WorkerError;
use super::prepare::Prepared;
use crate::control::Ends;
use crate::engine::{KvMemory, UnitLimits};
use crate::ep::{ExpertParallel, WireRows};
use crate::model::gpu::{GpuLink, GpuSettings, meet};
use crate::model::{AttentionPlan, ExpertRoom, Model, ModelConfig, ModelError};
#[cfg(feature = "cuda")]
use crate::threads::lock;

/// Assigns parts of a GPU to the ranks of a process.
pub trait GpuProvider: Send + Sync {
    /// Returns the free bytes before anything is loaded.
    ///
    /// # Errors
    /// The driver's message.
    fn free_bytes(&self) -> Result<u64, GpuError>;

    /// Returns the part of the GPU for a rank, counted from the first rank of this process. Each rank calls this once,
    /// with the same `room` for collectives.
    ///
    /// # Errors
    /// The driver's message, for example if memory is insufficient.
    fn rank(&self, rank: usize, room: Room) -> Result<LocalRank, GpuError>;
}

/// Returns the GPU memory that the weights leave for keys and values, estimated from the checkpoint's file sizes.
pub(super) fn kv_memory(
    config: &WorkerConfig,
    model_dir: &Path,
    model: &ModelConfig,
) -> Result<Option<KvMemory>, WorkerError> {
    let (Some(gpu), DeviceChoice::Cuda { dtype, ranks_here }) = (&config.gpu, config.device) else { return Ok(None) };
    let free = gpu.free_bytes().map_err(|error| WorkerError::Model(ModelError::Gpu(error)))?;
    let mut weights = 0;
    for entry in std::fs::read_dir(model_dir).map_err(ModelError::io(model_dir))?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "safetensors") {
            weights += entry.metadata().map_err(ModelError::io(&entry.path()))?.len();
        }
    }
    // Checkpoints nearly always use two-byte types, so scale their size to `dtype`.
    let weights = weights.saturating_mul(dtype.bytes() as u64) / 2;
    let (here, world) = (u64::from(ranks_here), u64::from(config.world));
    let experts = (model.num_moe_layers() * model.num_experts) as u64;
    let experts = experts * (3 * model.hidden * model.expert_width * dtype.bytes()) as u64;
    // Each rank has its share of the experts, and all other weights.
    let weights = weights.saturating_sub(experts) * here + experts * here / world;
    let available = Some(free.saturating_sub(weights) / here * world);
    Ok(Some(KvMemory { available, element_bytes: dtype.bytes() }))
}

/// Creates the link over which the ranks synchronize, and the host collectives that count their rows.
pub(super) fn join(config: &WorkerConfig, dtype: Dtype, ends: Ends) -> Result<(GpuLink, WireRows), WorkerError> {
    let link = ends.link(config).map_err(WorkerError::Runtime)?;
    let link = UnitLink::join(link, 1).map_err(|error| WorkerError::Lost(error.to_string()))?;
    let rank = link.rank();
    // Rows move between GPUs: these collectives carry only messages and row counts.
    let rows = match dtype {
        Dtype::Bf16 => WireRows::bf16(Box::new(RowCollectives::new(link.clone(), PrivateMemory::<bf16>::new(rank)))),
        Dtype::F32 | Dtype::F16 => {
            WireRows::f32(Box::new(RowCollectives::new(link.clone(), PrivateMemory::<f32>::new(rank))))
        }
    };
    Ok((link, rows))
}

/// Loads a rank's model on the GPU.
pub(super) fn load(
    config: &WorkerConfig,
    prepared: &Prepared,
    limits: UnitLimits,
    attention: AttentionPlan,
    link: GpuLink,
    ep: &mut ExpertParallel,
) -> Result<Model, WorkerError> {
    let (DeviceChoice::Cuda { dtype, ranks_here }, Some(gpu)) = (config.device, &config.gpu) else {
        return Err(WorkerError::arguments("this rank has no GPU"));
    };
    let start = config.attention;
    // If attention switches, a rank may have to run the sequences of all ranks.
    let ranks = if config.both_attentions { link.world() } else { 1 };
    let settings = GpuSettings {
        dtype,
        step_tokens: limits.step_tokens,
        running: limits.running * ranks,
        pages: limits.kv_pages.of(start),
        other_pages: limits.kv_pages.of(start.other()),
    };
    let room = settings.room(link.world(), &prepared.served.config);
    // `device::check` has ensured that a process starts at a multiple of its rank count.
    let local = gpu.rank(link.rank() % usize::from(ranks_here), room).map_err(ModelError::Gpu)?;
    let rank = meet(local, ep).map_err(|error| match error.rank() == link.rank() {
        true => WorkerError::arguments(error),
        false => WorkerError::Lost(error.to_string()),
    })?;
    let experts = ExpertRoom { slots: config.expert_slots, ..config.experts.into() };
    Ok(Model::load_on(&prepared.served.dir, &prepared.placement, experts, attention, settings, rank, link)?)
}

/// Opens the GPU that the configuration requests, unless it already has one.
pub(super) fn with_gpu(mut config: WorkerConfig) -> Result<WorkerConfig, WorkerError> {
    if matches!(config.device, DeviceChoice::Cuda { .. }) && config.gpu.is_none() {
        config.gpu = Some(open(&config)?);
    }
    Ok(config)
}

/// Opens the GPU for [`DeviceChoice::Cuda`].
///
/// # Errors
/// One sentence: a missing or outdated driver, no kernels for the GPU, or a build without CUDA.
fn open(config: &WorkerConfig) -> Result<Arc<dyn GpuProvider>, WorkerError> {
    #[cfg(feature = "cuda")]
    {
        let index = visible_devices().map_err(WorkerError::arguments).and_then(|visible| gpu_index(config, visible))?;
        let unit = DeviceUnit::open(index, config.kernels.as_deref()).map_err(WorkerError::arguments)?;
        let (here, timeout) = (config.device.ranks_here().into(), config.collective_timeout);
        Ok(Arc::new(CudaGpu { unit, here, timeout, parts: Mutex::default() }))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = config;
        Err(WorkerError::arguments(super::device::NO_GPU))
    }
}

/// A GPU of this machine.
#[cfg(feature = "cuda")]
struct CudaGpu {
    unit: DeviceUnit,
    /// Number of ranks of this process.
    here: usize,
    /// How long a kernel waits for another rank's kernel.
    timeout: Duration,
    /// Each rank's part, once the first rank has requested its own.
    parts: Mutex<Option<Vec<Option<LocalRank>>>>,
}

#[cfg(feature = "cuda")]
impl GpuProvider for CudaGpu {
    fn free_bytes(&self) -> Result<u64, GpuError> {
        Ok(self.unit.memory()?.0)
    }

    fn rank(&self, rank: usize, room: Room) -> Result<LocalRank, GpuError> {
        let mut parts = lock(&self.parts);
        if parts.is_none() {
            let ranks = self.unit.ranks(self.here, &room, self.timeout)?;
            *parts = Some(ranks.into_iter().map(Some).collect());
        }
        let part = parts.as_mut().and_then(|parts| parts.get_mut(rank)?.take());
        part.ok_or_else(|| format!("no part of it is left for rank {rank}").into())
    }
}
