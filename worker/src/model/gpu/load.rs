//! Loads a GPU backend, so that everything it needs is on the GPU before ranks start waiting for one another.

use std::sync::Arc;

use semmoe_kernels::Element;
use semmoe_kernels_cuda::unit::{DeviceCollectives, PeerMemory, RoutedCollectives, UnitRank};

use super::attention::{Cache, DeviceHeadNorms, PageLayout, grouped};
use super::backend::{GpuBackend, HostLists, LayerNorms};
use super::buffers::{Buffers, Widths};
use super::experts::{DeviceExperts, DeviceHosts};
use super::matrix::{DeviceMatrix, Uploader};
use super::memory::Stream;
use super::switch::{LIST_BYTES, Mover};
use super::{GpuLink, GpuSettings};
use crate::ep::ExpertPlacement;
use crate::model::checkpoint::Checkpoint;
use crate::model::expert::Place;
use crate::model::layout::HeadSlices;
use crate::model::load::Loader;
use crate::model::slices::HeadSlice;
use crate::model::weights::{Block, FeedForward};
use crate::model::{ModelConfig, ModelError};

/// The inputs from which a GPU backend is loaded.
pub(in crate::model) struct GpuLoad<'a> {
    pub(in crate::model) checkpoint: &'a Checkpoint,
    pub(in crate::model) config: &'a Arc<ModelConfig>,
    pub(in crate::model) at: Place,
    pub(in crate::model) slices: &'a HeadSlices,
    pub(in crate::model) placement: &'a ExpertPlacement,
    /// Maximum number of whole experts per layer that any rank may have after a switch.
    pub(in crate::model) slots: Option<u16>,
    pub(in crate::model) settings: GpuSettings,
}

impl<T: Element> GpuBackend<T> {
    /// Loads a rank's part of a checkpoint. All memory is allocated here, because nothing may be allocated while ranks
    /// wait for one another.
    ///
    /// # Errors
    /// Fails for the same reasons as the CPU backend, and also if GPU memory is insufficient or a GPU call fails.
    pub(in crate::model) fn load(load: &GpuLoad<'_>, rank: UnitRank, link: GpuLink) -> Result<Self, ModelError> {
        let GpuLoad { checkpoint, config, at, slices, placement, slots, settings } = *load;
        let UnitRank { runner: accelerator, team, symmetric, own } = rank;
        let uploader = Uploader::<T>::new(&accelerator);
        let loader = |heads| Loader { checkpoint, config, heads, packer: &uploader };
        let weights = loader(slices.start).load()?;
        let other_heads = slices.other.map(|heads| loader(heads).load_heads()).transpose()?;
        let experts = DeviceExperts::load(&loader(slices.start), at, placement, slots)?;
        let norms = weights.blocks.iter().map(|block| LayerNorms::new(block, &uploader)).collect::<Result<_, _>>()?;
        let final_norm = uploader.vector(&weights.final_norm)?;
        let pages = |heads: HeadSlice, pages| PageLayout::new(pages, heads.cache_shape(config));
        let other_pages = slices.other.map(|heads| pages(heads, settings.other_pages));
        let cache = Cache::new(config, pages(slices.start, settings.pages), other_pages, &uploader)?;
        let first = weights.blocks.first().map(|block| &block.heads);
        let first = first.into_iter().chain(other_heads.iter().filter_map(|heads| heads.first()));
        let first: Vec<_> = first.map(|heads| grouped(&heads.attention)).collect::<Result<_, _>>()?;
        let scratch = cache.scratch_bytes(settings.step_tokens, T::DTYPE, first.into_iter());
        let widths = Widths::of(config, &weights, &other_heads);
        let buffers = Buffers::new::<T>(widths, &settings, at.world, scratch, &accelerator).map_err(ModelError::Gpu)?;
        let mover = Mover { team, list: uploader.allocate(LIST_BYTES)?, memory: None };
        let room = settings.room(at.world, config);
        // SAFETY: `UnitRank` guarantees that the memory is on this GPU and used only by these ranks' collectives.
        let rows = unsafe { PeerMemory::new(room, team, &symmetric, own, Arc::clone(&accelerator)) };
        let rows = rows.map_err(|error| ModelError::Gpu(error.into()))?;
        let unit: Box<dyn RoutedCollectives<T>> = Box::new(DeviceCollectives::new(link, rows));
        Ok(Self {
            config: Arc::clone(config),
            stream: Stream::new(accelerator, at.rank),
            unit,
            weights,
            other_heads,
            norms,
            final_norm,
            experts,
            hosts: DeviceHosts::new(config, &uploader)?,
            cache,
            mover,
            buffers,
            lists: HostLists::default(),
            rows: 0,
            own: 0..0,
            all_rows: 0,
            is_pending: false,
            is_alone: at.world == 1,
            keeps: false,
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
