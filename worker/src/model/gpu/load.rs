//! How a backend begins: everything that it needs is on the GPU before ranks meet.

use std::sync::Arc;

use semmoe_kernels::Element;
use semmoe_kernels::collectives::Collectives;
use semmoe_kernels_cuda::unit::{DeviceCollectives, Gpu, PeerMemory, UnitRank};
use semmoe_tables::RankId;

use super::attention::{Cache, DeviceHeadNorms, grouped};
use super::backend::{GpuBackend, HostLists, LayerNorms};
use super::buffers::{Buffers, Widths};
use super::experts::DeviceExperts;
use super::matrix::{DeviceMatrix, Uploader};
use super::memory::Stream;
use super::{GpuLink, GpuSettings};
use crate::ep::ExpertSpread;
use crate::model::checkpoint::Checkpoint;
use crate::model::expert::Place;
use crate::model::load::Loader;
use crate::model::share::{HeadShare, expert_columns};
use crate::model::weights::{Block, FeedForward};
use crate::model::{ModelConfig, ModelError};

/// Everything that a backend is loaded from.
pub(in crate::model) struct GpuLoad<'a> {
    pub(in crate::model) checkpoint: &'a Checkpoint,
    pub(in crate::model) config: &'a Arc<ModelConfig>,
    pub(in crate::model) at: Place,
    pub(in crate::model) share: HeadShare,
    pub(in crate::model) spread: &'a ExpertSpread,
    pub(in crate::model) settings: GpuSettings,
}

impl<T: Element> GpuBackend<T> {
    /// Loads a rank's part of a checkpoint. All memory is taken here: none is while ranks wait for one another.
    ///
    /// # Errors
    /// As for other backends; memory that is short, a GPU that refuses.
    pub(in crate::model) fn load(load: &GpuLoad<'_>, rank: UnitRank, link: GpuLink) -> Result<Self, ModelError> {
        let GpuLoad { checkpoint, config, at, share, spread, settings } = *load;
        let UnitRank { runner: accelerator, team, symmetric, own } = rank;
        let uploader = Uploader::<T>::new(&accelerator);
        let loader = Loader { checkpoint, config, share, packer: &uploader };
        let weights = loader.load()?;
        let columns = expert_columns(config, spread.layout, at.rank, at.world)?;
        let id = RankId::new(at.rank as u16);
        let experts = DeviceExperts::load(&loader, id, spread, &columns)?;
        let norms = weights.blocks.iter().map(|block| LayerNorms::new(block, &uploader)).collect::<Result<_, _>>()?;
        let final_norm = uploader.vector(&weights.final_norm)?;
        let shape = share.cache_shape(config);
        let cache = Cache::new(config, shape, settings.pages, &uploader)?;
        let first = weights.blocks.first().map(|block| grouped(&block.heads.attention)).transpose()?;
        let scratch = first.map_or(0, |of| {
            let heads = cache.heads(0, of, T::DTYPE);
            heads.scratch_bytes(settings.step_tokens as u64, shape.max_positions as u64)
        });
        let widths = Widths::of(config, &weights, &experts);
        let buffers = Buffers::new::<T>(widths, &settings, at.world, scratch, &accelerator).map_err(ModelError::Gpu)?;
        let room = settings.room(at.world, config.hidden);
        // SAFETY: memory of this GPU which only these ranks' collectives use, as `UnitRank` says.
        let mover = unsafe { PeerMemory::new(room, team, &symmetric, own, Arc::clone(&accelerator)) };
        let mover = mover.map_err(|error| ModelError::Gpu(error.to_string()))?;
        let unit: Box<dyn Collectives<T, Gpu>> = Box::new(DeviceCollectives::new(link, mover));
        Ok(Self {
            config: Arc::clone(config),
            stream: Stream::new(accelerator, at.rank),
            unit,
            weights,
            norms,
            final_norm,
            experts,
            cache,
            buffers,
            lists: HostLists::default(),
            rows: 0,
            own_rows: 0,
            is_pending: false,
        })
    }
}

impl LayerNorms {
    pub(super) fn new<T: Element>(block: &Block<DeviceMatrix>, uploader: &Uploader<T>) -> Result<Self, ModelError> {
        let correction = match &block.feed_forward {
            FeedForward::Moe(moe) => moe.correction.as_deref().map(|values| uploader.vector(values)).transpose()?,
            FeedForward::Dense(_) => None,
        };
        Ok(Self {
            input: uploader.vector(&block.input_norm)?,
            post: uploader.vector(&block.post_norm)?,
            post_rounded: uploader.rounded(&block.post_norm)?,
            heads: DeviceHeadNorms::new(grouped(&block.heads.attention)?, uploader)?,
            correction,
        })
    }
}
