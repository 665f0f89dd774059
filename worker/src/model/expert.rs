//! A rank's routed experts, packed in one buffer in which a switch moves them ([`semmoe_kernels::reshard`]).
//!
//! An expert has one *slice* per rank of the unit if that divides its intermediate width, and a single one otherwise. A
//! slice is packed like matrices with its columns:
//!
//! | array | what | cut by slices |
//! |---|---|---|
//! | 0 | gate above up, `[2 x width, H]`, slice by slice | whole slices in sequence |
//! | 1 | down, `[H, width]`, in groups of columns of the panels | each group has the rows of slice 0, then of slice 1 |
//!
//! So an expert takes one product with array 0 and one with array 1 in either layout, and moving a slice takes one copy
//! of array 0 and one for each group of array 1.

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
use crate::ep::{ExpertLayout, ExpertPlacement, LocalExperts};
use crate::threads::threads_for;

const GATE_UP: usize = 0;
const DOWN: usize = 1;

/// A rank's position in a unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) world: usize,
}

/// The element types of all experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ExpertTypes {
    pub(super) gate_up: PanelType,
    pub(super) down: PanelType,
}

/// How an expert is packed.
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
        // With experts ep or tp every slice exists somewhere in the unit.
        Ok(match layout.nodes().is_none() && config.expert_width.is_multiple_of(at.world) {
            true => Self { slices: at.world, width: config.expert_width / at.world, first: 0, ..part },
            false => part,
        })
    }

    /// A rank's part of an expert as one slice that never moves.
    pub(super) fn in_place(
        config: &ModelConfig,
        layout: ExpertLayout,
        at: Place,
        types: ExpertTypes,
    ) -> Result<Self, ModelError> {
        let kept = expert_columns(config, layout, at.rank, at.world)?;
        Ok(Self { hidden: config.hidden, slices: 1, width: kept.len(), first: kept.start, types })
    }

    /// The range of a whole expert's columns that is packed.
    pub(super) fn columns(&self) -> Range<usize> {
        self.first..self.first + self.slices * self.width
    }

    /// Bytes of the arrays of one slice.
    pub(super) fn array_bytes(&self) -> [usize; 2] {
        [
            Linear::packed_bytes(self.types.gate_up, 2 * self.width, self.hidden),
            Linear::packed_bytes(self.types.down, self.hidden, self.width),
        ]
    }

    /// Packs gate and up, given only the rows in [`Packing::columns`], and down, given the whole `width`, into the
    /// arrays of an expert with one slice. Leaves padding unchanged.
    pub(super) fn pack_in_place(
        &self,
        [gate, up, down]: &[TensorData<'_>; 3],
        width: usize,
        [gate_up, packed_down]: [&mut [u32]; 2],
    ) {
        Linear::pack_into(self.types.gate_up, &[*gate, *up], self.hidden, &(0..self.hidden), gate_up);
        Linear::pack_into(self.types.down, &[*down], width, &self.columns(), packed_down);
    }

    /// The number of threads that share a layer's rows (see [`LocalExperts::threads`]), by the number of experts and
    /// slices.
    pub(super) fn threads(&self, pairs: usize, experts: usize, slices: usize) -> usize {
        let by_rows = pairs / (ROWS_OF_A_THREAD * experts).max(1);
        threads_for(pairs * 3 * self.hidden * self.width * slices).min(by_rows).max(1)
    }

    /// Applies an expert of `slices` slices; see [`LocalExperts::apply`].
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

    /// Outputs of gate and up of a slice, padded to whole panels.
    fn outputs(&self) -> usize {
        (2 * self.width).next_multiple_of(group_of(2 * self.width))
    }

    /// Columns of a slice, padded to whole words.
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

    /// The packed arrays of one slice.
    fn pack(&self, [gate, up, down]: &[TensorData<'_>; 3], width: usize, slice: usize) -> [Linear; 2] {
        let first = self.first + slice * self.width;
        let rows = first * self.hidden..(first + self.width) * self.hidden;
        let gate_up = [gate, up].map(|part| part.part(rows.clone()));
        [
            Linear::pack_as(self.types.gate_up, &gate_up, self.hidden),
            Linear::pack_columns(self.types.down, &[*down], width, first..first + self.width),
        ]
    }

    /// `silu(gate) * up` of all slices of all rows; padding is 0.
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

/// Room on a rank for placements other than the first one.
#[derive(Clone, Copy)]
pub(super) struct SwitchRoom<'a> {
    /// Whole experts of a layer on a rank; at least as many as in the first placement.
    pub(super) slots: Option<u16>,
    /// Ranks of each kind of independent group.
    pub(super) groups: &'a [usize],
}

/// All routed experts, or slices of them, on a rank.
pub(super) struct Experts {
    packing: Packing,
    /// Width of a whole expert.
    width: usize,
    pub(super) pool: Pool,
    pub(super) layout: Layout,
    pub(super) side: Side,
    pub(super) memory: SharedExperts,
    /// Bytes at the low and the high end of the buffer that were ever written.
    touched: [usize; 2],
    /// Checksums of what was loaded: of this rank's pieces, and after the first exchange of all ranks'.
    pub(super) checksums: Checksums,
}

impl Experts {
    /// Allocates memory for a rank's experts in a placement and in those that `room` names.
    pub(super) fn new(
        config: &ModelConfig,
        at: Place,
        placement: &ExpertPlacement,
        types: ExpertTypes,
        room: SwitchRoom<'_>,
    ) -> Result<Self, ModelError> {
        let SwitchRoom { slots, groups } = room;
        let packing = Packing::new(config, placement.layout, at, types)?;
        let capacity = Capacity::new(placement, at.world, slots).map_err(ModelError::Experts)?;
        let shape = packing.shape().map_err(ModelError::Experts)?;
        let pool = capacity.pool(shape, config.num_experts, packing.slices == at.world).map_err(ModelError::Experts)?;
        if !groups.is_empty() && packing.slices != at.world {
            return Err(ModelError::ExpertWidth { width: config.expert_width, ranks: at.world });
        }
        let pool = if groups.is_empty() { pool } else { pool.with_groups(groups).map_err(ModelError::Experts)? };
        let layout = capacity.layout;
        let memory = SharedExperts::create(at.rank, at.world, pool.bytes())
            .map_err(|error| ModelError::ExpertMemory(error.into()))?;
        let checksums = Checksums::new(&pool);
        let touched = [0; 2];
        let mut experts =
            Self { packing, width: config.expert_width, pool, layout, side: Side::Low, memory, touched, checksums };
        experts.touch();
        Ok(experts)
    }

    /// Bytes of the buffer that a switch to a placement writes for the first time.
    pub(super) fn untouched(&self, to: &ExpertPlacement) -> usize {
        let slot = self.arrange(to).map_or(0, |layout| self.pool.slot_bytes(&layout));
        let [near, far] = match self.side {
            Side::High => [self.touched[0], self.touched[1]],
            Side::Low => [self.touched[1], self.touched[0]],
        };
        (slot * self.pool.layers()).saturating_sub(near).min(self.pool.bytes().saturating_sub(near + far))
    }

    /// Notes what the layout in force has written.
    pub(super) fn touch(&mut self) {
        let (bytes, end) =
            (self.pool.slot_bytes(&self.layout) * self.pool.layers(), usize::from(self.side == Side::High));
        self.touched[end] = self.touched[end].max(bytes);
    }

    /// Packs this rank's part of a layer. `tensors` returns gate, up and down of an expert, and is called for all
    /// experts.
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

    /// Slices that this rank has of each of its experts.
    fn slices(&self) -> usize {
        match self.layout {
            Layout::Ep(_) => self.packing.slices,
            Layout::Tp => 1,
            Layout::Groups(ranks) => self.packing.slices / ranks,
        }
    }

    /// Number of experts on this rank in a layer.
    fn count(&self, layer: LayerIdx) -> usize {
        hosted(&self.pool, &self.layout, layer, self.memory.rank())
    }

    fn array(&self, layer: LayerIdx, position: usize, array: usize) -> &[u32] {
        let slot = Slot { layout: &self.layout, side: self.side, layer: layer.index() };
        bytemuck::cast_slice(&self.memory.own()[self.pool.entry(slot, self.memory.rank(), position, array)])
    }

    /// Simulates a layer that was corrupted in memory.
    #[cfg(test)]
    pub(super) fn corrupt(&mut self, layer: usize) {
        let at = self.pool.slot(&self.layout, self.side, layer).start;
        let byte = self.memory.own()[at];
        self.memory.write(at, &[byte ^ 1]).unwrap();
    }

    /// The places of the experts in a placement.
    pub(super) fn arrange(&self, placement: &ExpertPlacement) -> Result<Layout, ReshardError> {
        arrange(&self.pool, placement)
    }
}

/// A rank's capacity for experts.
pub(super) struct Capacity {
    pub(super) layout: Layout,
    world: usize,
    layers: usize,
    /// Whole experts per layer.
    slots: usize,
}

impl Capacity {
    /// The capacity for a placement and any other with at most `slots` whole experts on a rank; at least as many as in
    /// this placement.
    pub(super) fn new(placement: &ExpertPlacement, world: usize, slots: Option<u16>) -> Result<Self, ReshardError> {
        let whole = match placement.layout.is_sliced() {
            true => ExpertPlacement { layout: ExpertLayout::Ep, ..placement.clone() },
            false => placement.clone(),
        };
        let (whole, layers) = (hosts(&whole, world)?, placement.replicas.layers());
        let slots = whole.slots().max(slots.unwrap_or(0).into());
        let layout = sliced(placement.layout).unwrap_or(Layout::Ep(whole));
        Ok(Self { layout, world, layers, slots })
    }

    /// Slots for experts of this shape; `sliced`: in every layout as slices, one per rank.
    pub(super) fn pool(&self, shape: ExpertShape, experts: usize, sliced: bool) -> Result<Pool, ReshardError> {
        let pool = Pool::new(shape, NodeGrid::of_nodes(1, self.world)?, experts, self.layers, self.slots)?;
        Ok(if sliced { pool } else { pool.ep_only() })
    }
}

/// The places of a pool's experts in a placement.
pub(super) fn arrange(pool: &Pool, placement: &ExpertPlacement) -> Result<Layout, ReshardError> {
    let layout = match sliced(placement.layout) {
        Some(layout) => layout,
        None => Layout::Ep(hosts(placement, pool.grid().ranks())?),
    };
    pool.check(&layout).map(|()| layout)
}

/// The layout of a pool whose ranks have slices of all experts.
fn sliced(layout: ExpertLayout) -> Option<Layout> {
    match layout {
        ExpertLayout::Tp => Some(Layout::Tp),
        ExpertLayout::Groups(groups) => Some(Layout::Groups(groups.ranks.into())),
        ExpertLayout::Ep | ExpertLayout::Hybrid(_) => None,
    }
}

/// Number of experts on a rank in a layer.
pub(super) fn hosted(pool: &Pool, layout: &Layout, layer: LayerIdx, rank: usize) -> usize {
    match layout {
        Layout::Tp | Layout::Groups(_) => pool.experts(),
        Layout::Ep(hosts) => hosts.of_rank(layer.index(), rank).iter().filter(|&&expert| expert != NO_HOST).count(),
    }
}

/// Each rank's experts in ascending id, the order of their slots.
fn hosts(placement: &ExpertPlacement, world: usize) -> Result<Hosts, ReshardError> {
    let experts: usize = placement.replicas.experts().into();
    let of = |rank: usize, layer: usize| placement.experts_of(RankId::new(rank as u16), LayerIdx::new(layer as u16));
    let layers = 0..placement.replicas.layers();
    let counts = layers.clone().flat_map(|layer| (0..world).map(move |rank| of(rank, layer).count()));
    let slots = counts.max().unwrap_or(0);
    let layer = |layer: usize| {
        let slots_of = |rank: usize| of(rank, layer).map(ExpertId::get).chain(std::iter::repeat(NO_HOST)).take(slots);
        (0..world).flat_map(slots_of).collect::<Vec<u16>>()
    };
    Hosts::new(experts, world, layers.map(layer).collect())
}

/// Rows of an expert that justify another thread's reading of its weights.
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
