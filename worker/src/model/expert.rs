//! A rank's routed experts, packed into one buffer, within which a switch moves them ([`semmoe_kernels::reshard`]).
//!
//! An expert consists of one *slice* per rank if the number of ranks divides its intermediate width, and of a single
//! slice otherwise. Each slice packs its columns into two arrays:
//!
//! | array | contents | division into slices |
//! |---|---|---|
//! | 0 | gate above up, `[2 x width, H]`, slice by slice | consecutive slices |
//! | 1 | down, `[H, width]`, in the panels' column groups | in each group, the rows of slice 0, then of slice 1 |
//!
//! In either layout an expert therefore needs one matrix product with array 0 and one with array 1. Moving a slice
//! takes one copy for array 0 and one per column group for array 1.

use std::ops::Range;

use semmoe_kernels::NodeGrid;
use semmoe_kernels::reshard::{
    Checksums, ExpertArray, ExpertMemory as _, ExpertShape, Hosts, Layout, NO_HOST, PieceHash, Pool, ReshardError,
    Side, Slot,
};
use semmoe_ranks::SharedExperts;
use semmoe_tables::{ExpertId, LayerIdx, RankId};

use super::checkpoint::TensorData;
use super::compute::{Linear, Matrix, PanelType, Sizes, group_of, multiply, silu_product};
use super::slices::expert_columns;
use super::{ModelConfig, ModelError};
use crate::ep::{ExpertLayout, ExpertPlacement, LocalExperts, NodeLayout};
use crate::threads::threads_for;

const GATE_UP: usize = 0;
const DOWN: usize = 1;

/// A rank's position in a unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) world: usize,
}

/// Element types, the same for all experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ExpertTypes {
    pub(super) gate_up: PanelType,
    pub(super) down: PanelType,
}

/// An expert's packed format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    hidden: usize,
    slices: usize,
    /// Columns of a slice.
    width: usize,
    /// First column of slice 0.
    first: usize,
    types: ExpertTypes,
}

impl Packing {
    fn new(config: &ModelConfig, layout: ExpertLayout, at: Place, types: ExpertTypes) -> Result<Self, ModelError> {
        let part = Self::in_place(config, layout, at, types)?;
        Ok(match config.expert_width.is_multiple_of(at.world) {
            true => Self { slices: at.world, width: config.expert_width / at.world, first: 0, ..part },
            false => part,
        })
    }

    /// Describes a rank's part of an expert as a single slice that never moves.
    pub(super) fn in_place(
        config: &ModelConfig,
        layout: ExpertLayout,
        at: Place,
        types: ExpertTypes,
    ) -> Result<Self, ModelError> {
        let kept = expert_columns(config, layout, at.rank, at.world)?;
        Ok(Self { hidden: config.hidden, slices: 1, width: kept.len(), first: kept.start, types })
    }

    /// Returns the range of a whole expert's columns that is packed.
    pub(super) fn columns(&self) -> Range<usize> {
        self.first..self.first + self.slices * self.width
    }

    /// Sizes of one slice's arrays in bytes.
    pub(super) fn array_bytes(&self) -> [usize; 2] {
        [
            Linear::packed_bytes(self.types.gate_up, 2 * self.width, self.hidden),
            Linear::packed_bytes(self.types.down, self.hidden, self.width),
        ]
    }

    /// Packs a single-slice expert into its two arrays. The gate and up tensors contain only the rows in
    /// [`Packing::columns`], the down tensor the full `width`. Padding is left unchanged.
    pub(super) fn pack_in_place(
        &self,
        [gate, up, down]: &[TensorData<'_>; 3],
        width: usize,
        [gate_up, packed_down]: [&mut [u32]; 2],
    ) {
        Linear::pack_into(self.types.gate_up, &[*gate, *up], self.hidden, &(0..self.hidden), gate_up);
        Linear::pack_into(self.types.down, &[*down], width, &self.columns(), packed_down);
    }

    /// Returns how many threads should share a layer's rows (see [`LocalExperts::threads`]), given the number of
    /// experts and slices.
    pub(super) fn threads(&self, pairs: usize, experts: usize, slices: usize) -> usize {
        let by_rows = pairs / (ROWS_OF_A_THREAD * experts).max(1);
        threads_for(pairs * 3 * self.hidden * self.width * slices).min(by_rows).max(1)
    }

    /// Applies an expert with `slices` slices; see [`LocalExperts::apply`].
    pub(super) fn apply(
        &self,
        slices: usize,
        [gate_up, down]: [&[u32]; 2],
        x: &[f32],
        out: &mut [f32],
        work: &mut Vec<f32>,
    ) {
        let hidden = self.hidden;
        let (rows, outputs, inputs) = (x.len() / hidden, slices * self.outputs(), slices * self.inputs());
        work.resize(rows * (outputs + inputs), 0.0);
        let (both, product) = work.split_at_mut(rows * outputs);
        let columns = self.types.gate_up.columns(gate_up, group_of(2 * self.width));
        multiply(Sizes { m: rows, k: hidden, n: outputs }, Matrix { data: x, stride: hidden }, columns, both, outputs);
        self.activate(both, product);
        let columns = self.types.down.columns(down, group_of(hidden));
        multiply(
            Sizes { m: rows, k: inputs, n: hidden },
            Matrix { data: product, stride: inputs },
            columns,
            out,
            hidden,
        );
    }

    /// Gate and up outputs of one slice, padded to whole panels.
    fn outputs(&self) -> usize {
        (2 * self.width).next_multiple_of(group_of(2 * self.width))
    }

    /// Columns of one slice, padded to whole words.
    fn inputs(&self) -> usize {
        match self.types.down {
            PanelType::Bf16 => self.width.next_multiple_of(2),
            PanelType::F32 => self.width,
        }
    }

    fn shape(&self) -> Result<ExpertShape, ReshardError> {
        let [gate_up, down] = self.array_bytes();
        let groups = self.hidden.div_ceil(group_of(self.hidden));
        let arrays = [(1, gate_up), (groups, down / groups)];
        let arrays = arrays.map(|(outer, inner_bytes)| ExpertArray { outer, inner_bytes });
        ExpertShape::new(self.slices, arrays.to_vec())
    }

    /// Packs one slice into its two arrays.
    fn pack(&self, [gate, up, down]: &[TensorData<'_>; 3], width: usize, slice: usize) -> [Linear; 2] {
        let first = self.first + slice * self.width;
        let rows = first * self.hidden..(first + self.width) * self.hidden;
        let gate_up = [gate, up].map(|part| part.part(rows.clone()));
        [
            Linear::pack_as(self.types.gate_up, &gate_up, self.hidden),
            Linear::pack_columns(self.types.down, &[*down], width, first..first + self.width),
        ]
    }

    /// Computes `silu(gate) * up` for all slices of all rows and zeroes the padding.
    fn activate(&self, gate_up: &[f32], product: &mut [f32]) {
        let (outputs, inputs, width) = (self.outputs(), self.inputs(), self.width);
        if (outputs, inputs) == (2 * width, width) {
            return silu_product(gate_up, width, product);
        }
        for (gate_up, product) in gate_up.chunks_exact(outputs).zip(product.chunks_exact_mut(inputs)) {
            let (used, padding) = product.split_at_mut(width);
            silu_product(&gate_up[..2 * width], width, used);
            padding.fill(0.0);
        }
    }
}

/// Capacity that a rank reserves for placements other than its initial one.
#[derive(Clone, Copy)]
pub(super) struct SwitchRoom<'a> {
    /// Whole experts per layer that a rank must be able to hold; raised to the initial placement's maximum if lower.
    pub(super) slots: Option<u16>,
    /// Sizes, in ranks, of the independent groups to reserve capacity for.
    pub(super) groups: &'a [usize],
    /// The hybrid nodes to reserve capacity for.
    pub(super) hybrid: Option<NodeLayout>,
}

impl SwitchRoom<'_> {
    /// Returns whether experts in this layout can move. Leaving a hybrid layout requires reserved capacity.
    fn is_movable(&self, layout: ExpertLayout) -> bool {
        layout.nodes().is_none() || self.hybrid.is_some()
    }
}

/// A rank's routed experts, whole or sliced.
pub(super) struct Experts {
    packing: Packing,
    /// Width of a whole expert.
    width: usize,
    pub(super) pool: Pool,
    pub(super) layout: Layout,
    pub(super) side: Side,
    pub(super) memory: SharedExperts,
    /// Bytes written so far at the low end and at the high end of the buffer.
    touched: [usize; 2],
    /// Checksums recorded at load time: those of this rank's pieces, and after the first exchange those of all ranks.
    pub(super) checksums: Checksums,
}

impl Experts {
    /// Allocates memory for a rank's experts, sized for `placement` and for every placement that `room` allows.
    pub(super) fn new(
        config: &ModelConfig,
        at: Place,
        placement: &ExpertPlacement,
        types: ExpertTypes,
        room: SwitchRoom<'_>,
    ) -> Result<Self, ModelError> {
        let packing = match room.is_movable(placement.layout) {
            true => Packing::new(config, placement.layout, at, types)?,
            false => Packing::in_place(config, placement.layout, at, types)?,
        };
        let capacity = Capacity::new(placement, at.world, room).map_err(ModelError::Experts)?;
        let shape = packing.shape().map_err(ModelError::Experts)?;
        let pool = capacity.pool(shape, config.num_experts, packing.slices == at.world).map_err(ModelError::Experts)?;
        if (!room.groups.is_empty() || room.hybrid.is_some()) && packing.slices != at.world {
            return Err(ModelError::ExpertWidth { width: config.expert_width, ranks: at.world });
        }
        let nodes: Vec<usize> = room.hybrid.iter().map(|nodes| nodes.width.into()).collect();
        let pool = pool.with_groups(room.groups).and_then(|pool| pool.with_hybrid(&nodes));
        let (pool, layout) = (pool.map_err(ModelError::Experts)?, capacity.layout);
        let memory = SharedExperts::create(at.rank, at.world, pool.bytes())
            .map_err(|error| ModelError::ExpertMemory(error.into()))?;
        let checksums = Checksums::new(&pool);
        let touched = [0; 2];
        let mut experts =
            Self { packing, width: config.expert_width, pool, layout, side: Side::Low, memory, touched, checksums };
        experts.touch();
        Ok(experts)
    }

    /// Returns how many bytes of the buffer a switch to this placement would write for the first time.
    pub(super) fn untouched(&self, to: &ExpertPlacement) -> usize {
        let slot = self.arrange(to).map_or(0, |layout| self.pool.slot_bytes(&layout));
        let [near, far] = match self.side {
            Side::High => [self.touched[0], self.touched[1]],
            Side::Low => [self.touched[1], self.touched[0]],
        };
        (slot * self.pool.layers()).saturating_sub(near).min(self.pool.bytes().saturating_sub(near + far))
    }

    /// Records how much of the buffer the current layout has written.
    pub(super) fn touch(&mut self) {
        let (bytes, end) =
            (self.pool.slot_bytes(&self.layout) * self.pool.layers(), usize::from(self.side == Side::High));
        self.touched[end] = self.touched[end].max(bytes);
    }

    /// Packs this rank's part of a layer. `tensors` returns an expert's gate, up and down tensors; it is called for
    /// every expert, even those on other ranks, so that all are checked.
    pub(super) fn load<'a>(
        &mut self,
        layer: LayerIdx,
        tensors: impl Fn(ExpertId) -> Result<[TensorData<'a>; 3], ModelError>,
    ) -> Result<(), ModelError> {
        let mut parts = Vec::new();
        self.pool.parts(&self.layout, self.side, layer.index(), self.memory.rank(), &mut parts);
        for expert in (0..self.pool.experts() as u16).map(ExpertId::new) {
            let tensors = tensors(expert)?;
            let kept = parts.chunk_by(|a, b| a.piece == b.piece).filter(|piece| piece[0].piece.expert == expert.get());
            for piece in kept {
                let id = piece[0].piece;
                let arrays = self.packing.pack(&tensors, self.width, id.slice.into());
                let mut hash = PieceHash::default();
                for (part, array) in piece.iter().zip(&arrays) {
                    for (row, bytes) in array.packed().chunks_exact(part.bytes).enumerate() {
                        let at = part.place.offset + row * part.place.stride;
                        self.memory.write(at, bytes).map_err(ModelError::ExpertFault)?;
                        hash.update(bytes);
                    }
                }
                self.checksums.record(id, hash.finish()).map_err(ModelError::Experts)?;
            }
        }
        Ok(())
    }

    /// Moves the loaded experts into huge pages.
    pub(super) fn settle(&self) {
        let layers = self.pool.layers();
        let first = self.pool.slot(&self.layout, self.side, 0).start;
        self.memory.settle(first..self.pool.slot(&self.layout, self.side, layers - 1).end);
    }

    /// Number of slices that this rank stores per expert.
    fn slices(&self) -> usize {
        match self.layout {
            // Whole experts may have a single slice.
            Layout::Ep(_) => self.packing.slices,
            _ => self.packing.slices / self.pool.width(&self.layout),
        }
    }

    /// Number of this rank's experts in a layer.
    fn count(&self, layer: LayerIdx) -> usize {
        hosted(&self.pool, &self.layout, layer, self.memory.rank())
    }

    fn array(&self, layer: LayerIdx, position: usize, array: usize) -> &[u32] {
        let slot = Slot { layout: &self.layout, side: self.side, layer: layer.index() };
        bytemuck::cast_slice(&self.memory.own()[self.pool.entry(slot, self.memory.rank(), position, array)])
    }

    /// Simulates memory corruption in a layer.
    #[cfg(test)]
    pub(super) fn corrupt(&mut self, layer: usize) {
        let at = self.pool.slot(&self.layout, self.side, layer).start;
        let byte = self.memory.own()[at];
        self.memory.write(at, &[byte ^ 1]).unwrap();
    }

    /// Converts a placement to an assignment of experts to slots.
    pub(super) fn arrange(&self, placement: &ExpertPlacement) -> Result<Layout, ReshardError> {
        arrange(&self.pool, placement)
    }
}

/// A rank's expert capacity.
pub(super) struct Capacity {
    pub(super) layout: Layout,
    world: usize,
    layers: usize,
    /// Whole experts per layer.
    slots: usize,
}

impl Capacity {
    /// Computes the capacity for this placement and for any other with at most `room.slots` whole experts per rank;
    /// that is raised to this placement's maximum if lower.
    pub(super) fn new(placement: &ExpertPlacement, world: usize, room: SwitchRoom<'_>) -> Result<Self, ReshardError> {
        let movable = room.is_movable(placement.layout);
        let layout = if movable { ExpertLayout::Ep } else { placement.layout };
        let whole = hosts(&ExpertPlacement { layout, ..placement.clone() }, world, 1)?;
        let slots = whole.slots().max(room.slots.unwrap_or(0).into());
        let layout = if movable { layout_of(placement, world)? } else { Layout::Ep(whole) };
        Ok(Self { layout, world, layers: placement.replicas.layers(), slots })
    }

    /// Creates a pool for experts of this shape. If `sliced`, experts consist of one slice per rank in every layout.
    pub(super) fn pool(&self, shape: ExpertShape, experts: usize, sliced: bool) -> Result<Pool, ReshardError> {
        let pool = Pool::new(shape, NodeGrid::of_nodes(1, self.world)?, experts, self.layers, self.slots)?;
        Ok(if sliced { pool } else { pool.ep_only() })
    }
}

/// Converts a placement to an assignment of experts to a pool's slots, and checks that it fits the pool.
pub(super) fn arrange(pool: &Pool, placement: &ExpertPlacement) -> Result<Layout, ReshardError> {
    let layout = layout_of(placement, pool.grid().ranks())?;
    pool.check(&layout).map(|()| layout)
}

/// Returns the pool layout of a placement whose experts can move.
fn layout_of(placement: &ExpertPlacement, world: usize) -> Result<Layout, ReshardError> {
    Ok(match placement.layout {
        ExpertLayout::Tp => Layout::Tp,
        ExpertLayout::Groups(groups) => Layout::Groups(groups.ranks.into()),
        ExpertLayout::Ep => Layout::Ep(hosts(placement, world, 1)?),
        ExpertLayout::Hybrid(nodes) => Layout::Hybrid(hosts(placement, world, nodes.width.into())?),
    })
}

/// Returns the number of experts of which a rank has at least a slice in a layer.
pub(super) fn hosted(pool: &Pool, layout: &Layout, layer: LayerIdx, rank: usize) -> usize {
    let Some(hosts) = layout.hosts() else { return pool.experts() };
    let slots = hosts.of_host(layer.index(), rank / pool.width(layout));
    slots.iter().filter(|&&expert| expert != NO_HOST).count()
}

/// Assigns the experts of each host, which has `width` ranks, to its slots in ascending id order.
fn hosts(placement: &ExpertPlacement, world: usize, width: usize) -> Result<Hosts, ReshardError> {
    let (experts, count): (usize, usize) = (placement.replicas.experts().into(), world / width);
    let of = |host: usize, layer: usize| {
        placement.experts_of(RankId::new((host * width) as u16), LayerIdx::new(layer as u16))
    };
    let layers = 0..placement.replicas.layers();
    let counts = layers.clone().flat_map(|layer| (0..count).map(move |host| of(host, layer).count()));
    let slots = counts.max().unwrap_or(0);
    let layer = |layer: usize| {
        let slots_of = |host: usize| of(host, layer).map(ExpertId::get).chain(std::iter::repeat(NO_HOST)).take(slots);
        (0..count).flat_map(slots_of).collect::<Vec<u16>>()
    };
    Hosts::new(experts, count, layers.map(layer).collect())
}

/// Minimum rows of an expert per thread. With fewer rows, it does not pay off for another thread to read the expert's
/// weights.
const ROWS_OF_A_THREAD: usize = 4;

/// One layer's experts on this rank.
pub(super) struct LayerExperts<'a> {
    pub(super) experts: &'a Experts,
    pub(super) layer: LayerIdx,
}

impl LocalExperts for LayerExperts<'_> {
    fn threads(&self, pairs: usize) -> usize {
        self.experts.packing.threads(pairs, self.experts.count(self.layer), self.experts.slices())
    }

    fn apply(&self, slot: usize, x: &[f32], out: &mut [f32], work: &mut Vec<f32>) {
        let arrays = [GATE_UP, DOWN].map(|array| self.experts.array(self.layer, slot, array));
        self.experts.packing.apply(self.experts.slices(), arrays, x, out, work);
    }
}
