//! A rank's routed experts, and lists of the rows sent to them.

use std::ops::Range;

use semmoe_kernels::Element;
use semmoe_kernels::reshard::{ExpertArray, ExpertShape, Layout, Pool, ReshardError, Side};
use semmoe_kernels_cuda::Buffer;
use semmoe_kernels_cuda::compute::Tiles;
use semmoe_tables::{ExpertId, LayerIdx, RankId};

use super::matrix::Uploader;
use super::memory::{Stream, WordLists};
use crate::ep::{ExpertLayout, ExpertParallel, ExpertPlacement, UnitError};
use crate::model::checkpoint::TensorData;
use crate::model::expert::{Capacity, Place, SwitchRoom, arrange, hosted};
use crate::model::load::Loader;
use crate::model::slices::expert_columns;
use crate::model::{ModelConfig, ModelError};

/// The experts of all layers, whole or sliced, in memory within which a switch moves them
/// ([`semmoe_kernels::reshard`]). Gate and up are in one pool and down in another, so that each layer's experts are
/// stored as matrix products read them: `[slots, 2 x width, H]` and `[slots, H, width]`, in ascending order of expert
/// id.
pub(in crate::model) struct DeviceExperts {
    memory: Buffer,
    /// The pool for gate and up, then the pool for down.
    pub(super) pools: [Pool; 2],
    pub(super) layout: Layout,
    pub(super) side: Side,
    pub(super) rank: usize,
    /// Width of whole experts.
    width: usize,
}

/// Alignment of the pools in bytes.
const GRAIN: usize = 256;

/// One layer's experts.
#[derive(Clone, Copy)]
pub(super) struct DeviceLayer {
    pub(super) gate_up: Buffer,
    pub(super) down: Buffer,
    pub(super) slots: usize,
}

impl DeviceExperts {
    /// Loads a rank's experts into memory sized for this placement and for any other with at most `slots` whole experts
    /// per rank.
    pub(super) fn load<T: Element>(
        loader: &Loader<'_, Uploader<T>>,
        at: Place,
        placement: &ExpertPlacement,
        slots: Option<u16>,
    ) -> Result<Self, ModelError> {
        let (hidden, width, uploader) = (loader.config.hidden, loader.config.expert_width, loader.packer);
        let arrays = [(2, hidden * size_of::<T>()), (hidden, size_of::<T>())];
        let room = SwitchRoom { slots, groups: &[], hybrid: None };
        let capacity = Capacity::new(placement, at.world, room).map_err(ModelError::Experts)?;
        let pool = |(outer, inner_bytes)| -> Result<Pool, ReshardError> {
            let shape = ExpertShape::new(width, vec![ExpertArray { outer, inner_bytes }])?;
            capacity.pool(shape, loader.config.num_experts, width.is_multiple_of(at.world))
        };
        let [gate_up, down] = arrays.map(pool);
        let pools = [gate_up.map_err(ModelError::Experts)?, down.map_err(ModelError::Experts)?];
        let memory = uploader.allocate(pools[0].bytes().next_multiple_of(GRAIN) + pools[1].bytes())?;
        let experts = Self { memory, pools, layout: capacity.layout, side: Side::Low, rank: at.rank, width };
        let columns = expert_columns(loader.config, placement.layout, at.rank, at.world)?;
        loader.moe_layers().try_for_each(|layer| experts.load_layer(loader, placement, &columns, layer))?;
        Ok(experts)
    }

    /// Loads one layer. The tensors of every expert are checked, even those that only other ranks store.
    fn load_layer<T: Element>(
        &self,
        loader: &Loader<'_, Uploader<T>>,
        placement: &ExpertPlacement,
        columns: &Range<usize>,
        layer: LayerIdx,
    ) -> Result<(), ModelError> {
        let (hidden, uploader) = (loader.config.hidden, loader.packer);
        let DeviceLayer { gate_up, down, .. } = self.layer(layer);
        let (mut to_gate_up, mut to_down) = (Uploader::<T>::at(gate_up), Uploader::<T>::at(down));
        for expert in (0..loader.config.num_experts as u16).map(ExpertId::new) {
            let [gate, up, of_down] = loader.expert_tensors(layer, expert)?;
            if !placement.has(RankId::new(self.rank as u16), layer, expert) {
                continue;
            }
            let rows = |part: TensorData<'_>| -> Result<(), ModelError> {
                uploader.put(&part, hidden, &(0..hidden), &mut to_gate_up)
            };
            let kept = columns.start * hidden..columns.end * hidden;
            [gate.part(kept.clone()), up.part(kept)].into_iter().try_for_each(rows)?;
            uploader.put(&of_down, self.width, columns, &mut to_down)?;
        }
        Ok(())
    }

    /// Returns the memory that contains both pools.
    pub(super) fn memory(&self) -> Buffer {
        self.memory
    }

    /// Returns the offset of the second pool.
    pub(super) fn second(&self) -> usize {
        self.pools[0].bytes().next_multiple_of(GRAIN)
    }

    /// Number of an expert's columns that this rank stores.
    pub(super) fn width(&self) -> usize {
        if self.layout == Layout::Tp { self.width / self.pools[0].grid().ranks() } else { self.width }
    }

    /// Converts a placement to the pools' layout.
    pub(in crate::model) fn arrange(&self, placement: &ExpertPlacement) -> Result<Layout, ReshardError> {
        self.pools.iter().try_fold(Layout::Tp, |_, pool| arrange(pool, placement))
    }

    pub(super) fn layer(&self, layer: LayerIdx) -> DeviceLayer {
        let slots = hosted(&self.pools[0], &self.layout, layer, self.rank);
        let [gate_up, down] = [0, 1].map(|at| {
            let slot = self.pools[at].slot(&self.layout, self.side, layer.index());
            let first = slot.start + if at == 1 { self.second() } else { 0 };
            Buffer { bytes: slot.len() as u64, ..self.memory.from_offset(first as u64) }
        });
        DeviceLayer { gate_up, down, slots }
    }
}

/// The locations of all layers' experts on the GPU, from this rank's point of view.
pub(super) struct DeviceHosts {
    /// `[layers, 2, N]` u32: the slots, then the ranks.
    memory: Buffer,
    experts: usize,
    /// Whether there are ranks: each expert is on one of them.
    have_ranks: bool,
    /// The value of [`ExpertParallel::placements`] for which the memory was written; initially 0.
    written: u64,
}

impl DeviceHosts {
    pub(super) fn new<T: Element>(config: &ModelConfig, uploader: &Uploader<T>) -> Result<Self, ModelError> {
        let experts = config.num_experts;
        let memory = uploader.allocate(config.num_moe_layers() * 2 * experts * size_of::<u32>())?;
        Ok(Self { memory, experts, have_ranks: false, written: 0 })
    }

    /// Writes the current placement's tables unless they are already there.
    pub(super) fn write(&mut self, ep: &ExpertParallel, stream: &mut Stream) -> Result<(), UnitError> {
        if self.written != ep.placements() {
            let mut words = Vec::new();
            for layer in 0..ep.placement().replicas.layers() {
                words.extend(ep.hosts(LayerIdx::new(layer as u16)).words());
                words.resize((layer + 1) * 2 * self.experts, 0);
            }
            stream.write(&words, self.memory)?;
            (self.have_ranks, self.written) = (ep.placement().layout == ExpertLayout::Ep, ep.placements());
        }
        Ok(())
    }

    /// Returns the slots of a layer's experts and their ranks, `[N]` each. There are no ranks if every rank has a slice
    /// of each expert.
    pub(super) fn layer(&self, layer: LayerIdx) -> (Buffer, Option<Buffer>) {
        let mut lists = WordLists(self.memory.from_offset(8 * (layer.index() * self.experts) as u64));
        (lists.next(self.experts), self.have_ranks.then(|| lists.next(self.experts)))
    }
}

/// Lists of the row-expert pairs that a rank computes in a layer, sorted by expert, in GPU memory.
#[derive(Clone, Copy)]
pub(super) struct DevicePairs {
    pub(super) pairs: usize,
    pub(super) rows: usize,
    pub(super) room: Tiles,
    /// `[pairs]`: the row of each pair, sorted by expert.
    pub(super) row_of: Buffer,
    /// `[pairs]`, in f32
    pub(super) weights: Buffer,
    /// `[R + 1]`
    pub(super) first_pair: Buffer,
    /// `[pairs]`: the pairs of each row, by ascending expert.
    pub(super) pair_of: Buffer,
    /// `[tiles]`: each tile's expert slot, first pair and number of pairs.
    pub(super) tiles: Buffer,
}

impl DevicePairs {
    /// Returns the maximum number of words for this many pairs and rows, with experts in `slots` slots.
    pub(super) fn max_words(pairs: usize, rows: usize, slots: usize) -> usize {
        3 * pairs + rows + 1 + 3 * Tiles::most(pairs as u64, slots as u64) as usize
    }

    /// Lays out the lists consecutively.
    pub(super) fn new(at: Buffer, pairs: usize, rows: usize, room: Tiles) -> Self {
        let mut lists = WordLists(at);
        Self {
            pairs,
            rows,
            room,
            row_of: lists.next(pairs),
            weights: lists.next(pairs),
            first_pair: lists.next(rows + 1),
            pair_of: lists.next(pairs),
            tiles: lists.next(3 * room.count as usize),
        }
    }
}
