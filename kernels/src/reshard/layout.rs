//! Which experts a rank hosts, and where a layer's slot begins in the buffer.

use std::ops::Range;

use super::checksum::PieceId;
use super::error::ReshardError;
use super::shape::{ExpertArray, ExpertShape, MAX_IDS, check_count, check_equal};
use crate::nodes::NodeGrid;
use crate::split::even_part;

/// Marks an empty expert slot.
pub const NO_HOST: u16 = u16::MAX;

/// Which experts each rank hosts in each layer: any E, with replicas and empty slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hosts {
    experts: usize,
    ranks: usize,
    /// S: slots per rank
    slots: usize,
    /// `[K][ranks x S]`
    layers: Vec<Vec<u16>>,
}

impl Hosts {
    /// `layers` is `[K][ranks x S]`: rank r hosts the experts `layers[i][r * S..(r + 1) * S]` in layer i, [`NO_HOST`]
    /// for an empty slot.
    ///
    /// # Errors
    /// Layers of different lengths, or experts that are out of range, on one rank twice, or on no rank.
    pub fn new(experts: usize, ranks: usize, layers: Vec<Vec<u16>>) -> Result<Self, ReshardError> {
        check_count("experts", experts)?;
        check_count("ranks", ranks)?;
        let all = layers.first().map_or(0, Vec::len);
        if !all.is_multiple_of(ranks) {
            return Err(ReshardError::Divides { what: "the expert slots of a layer", found: all, divisor: ranks });
        }
        let slots = all / ranks;
        check_count("expert slots of a rank", slots)?;
        let hosts = Self { experts, ranks, slots, layers };
        for layer in 0..hosts.layers.len() {
            hosts.check(layer)?;
        }
        Ok(hosts)
    }

    /// Complete experts in order, as evenly as possible: the first experts mod ranks ranks host one more.
    ///
    /// # Errors
    /// See [`Hosts::new`].
    pub fn contiguous(experts: usize, ranks: usize, layers: usize) -> Result<Self, ReshardError> {
        check_count("experts", experts)?;
        check_count("ranks", ranks)?;
        let slots = experts.div_ceil(ranks);
        let mut layer = vec![NO_HOST; slots * ranks];
        for (rank, hosted) in layer.chunks_exact_mut(slots).enumerate() {
            let (first, end) = (even_part(experts, ranks, rank), even_part(experts, ranks, rank + 1));
            hosted.iter_mut().zip(first..end).for_each(|(slot, expert)| *slot = expert as u16);
        }
        Self::new(experts, ranks, vec![layer; layers])
    }

    fn check(&self, layer: usize) -> Result<(), ReshardError> {
        let row = &self.layers[layer];
        check_equal("expert slots of a layer", row.len(), self.slots * self.ranks)?;
        // The last rank seen to host each expert, plus 1.
        let mut last = vec![0; self.experts];
        for (slot, &expert) in row.iter().enumerate().filter(|(_, expert)| **expert != NO_HOST) {
            let rank = slot / self.slots;
            match last.get_mut(usize::from(expert)) {
                None => return Err(ReshardError::Expert { layer, slot, expert, experts: self.experts }),
                Some(seen) if *seen == rank + 1 => return Err(ReshardError::Twice { layer, rank, expert }),
                Some(seen) => *seen = rank + 1,
            }
        }
        match last.iter().position(|&seen| seen == 0) {
            None => Ok(()),
            Some(expert) => Err(ReshardError::Missing { layer, expert: expert as u16 }),
        }
    }

    /// S: expert slots per rank.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// `[S]`: the experts that a rank hosts in a layer. Panics if there is no such layer or rank.
    pub fn of_rank(&self, layer: usize, rank: usize) -> &[u16] {
        &self.layers[layer][rank * self.slots..(rank + 1) * self.slots]
    }
}

/// How experts are divided over ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Layout {
    /// Each rank has some complete experts.
    Ep(Hosts),
    /// Each rank has its slice of all experts; each node has all slices.
    Tp,
    /// TP in groups of this many neighbouring ranks, each with all experts: a rank has some neighbouring slices.
    Groups(usize),
}

/// The end of the buffer that a layout occupies; the rest is the spare room for the next switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Layer i begins i slots after the first byte.
    Low,
    /// Layer i begins K - i slots before the last byte.
    High,
}

impl Side {
    /// The side after a switch.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Low => Self::High,
            Self::High => Self::Low,
        }
    }
}

/// A rank's buffer: K slots for either layout, and one spare EP slot. All ranks' buffers have the same layout.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    pub(super) shape: ExpertShape,
    pub(super) grid: NodeGrid,
    pub(super) experts: usize,
    layers: usize,
    slots: usize,
    ep_bytes: usize,
    tp_bytes: usize,
    /// Of groups that there is room for.
    groups: Vec<GroupSlot>,
    bytes: usize,
}

/// Bytes of a layer's slot in groups of this many ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct GroupSlot {
    width: usize,
    bytes: usize,
}

impl Pool {
    /// A buffer for `experts` experts in each of `layers` layers, with up to `slots` expert slots on each rank under EP
    /// (including replicas and empty ones).
    ///
    /// # Errors
    /// Counts of 0 or above 65,535, too few slots for all experts, or more bytes than can be addressed.
    pub fn new(
        shape: ExpertShape,
        grid: NodeGrid,
        experts: usize,
        layers: usize,
        slots: usize,
    ) -> Result<Self, ReshardError> {
        for (what, found) in [("experts", experts), ("layers", layers), ("expert slots of a rank", slots)] {
            check_count(what, found)?;
        }
        let ranks = grid.ranks();
        check_count("ranks", ranks)?;
        if slots * ranks < experts {
            return Err(ReshardError::Room { slots, ranks, experts });
        }
        let widest = shape.steps(0, grid.width()).len();
        let slice_bytes = shape.first_bytes(shape.arrays().len(), widest);
        let bytes = || {
            let (ep, tp) = (shape.bytes().checked_mul(slots)?, slice_bytes.checked_mul(experts)?);
            let bytes = ep.max(tp).checked_mul(layers)?.checked_add(ep)?;
            (bytes <= isize::MAX as usize).then_some((ep, tp, bytes))
        };
        let (ep_bytes, tp_bytes, bytes) = bytes().ok_or(ReshardError::TooLarge)?;
        Ok(Self { shape, grid, experts, layers, slots, ep_bytes, tp_bytes, groups: Vec::new(), bytes })
    }

    /// Makes room for groups of this many ranks each as well: with S the bytes of the largest slot of any layout and X
    /// those of the next one, an EP slot at least, `K S + X`.
    ///
    /// # Errors
    /// Groups that do not divide the ranks of a node, more bytes than can be addressed.
    pub fn with_groups(mut self, widths: &[usize]) -> Result<Self, ReshardError> {
        let slices = self.grid.width();
        for &width in widths {
            if width == 0 || !slices.is_multiple_of(width) {
                let what = "the ranks of a node";
                return Err(ReshardError::Divides { what, found: slices, divisor: width });
            }
            let of_group = |place| self.held(&Layout::Groups(width), place).len();
            let widest = (0..width).map(of_group).max().unwrap_or(0);
            let expert = self.shape.first_bytes(self.shape.arrays().len(), widest);
            let bytes = expert.checked_mul(self.experts).ok_or(ReshardError::TooLarge)?;
            self.groups.push(GroupSlot { width, bytes });
        }
        let mut slots: Vec<usize> = self.groups.iter().map(|group| group.bytes).collect();
        slots.extend([self.ep_bytes, self.ep_bytes, self.tp_bytes]);
        slots.sort_unstable_by_key(|&bytes| std::cmp::Reverse(bytes));
        let bytes = slots[0].checked_mul(self.layers).and_then(|bytes| bytes.checked_add(slots[1]));
        self.bytes = bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or(ReshardError::TooLarge)?;
        Ok(self)
    }

    /// Limits the buffer to switches from one E to another: K + 1 EP slots, N times less on N nodes than with TP.
    #[must_use]
    pub fn ep_only(self) -> Self {
        Self { tp_bytes: 0, bytes: (self.layers + 1) * self.ep_bytes, ..self }
    }

    /// Bytes of each rank's buffer: `K max(T, X) + X` with T and X the bytes of a TP and an EP slot; for groups see
    /// [`Pool::with_groups`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// K
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// N: experts per layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Nodes and ranks.
    pub fn grid(&self) -> NodeGrid {
        self.grid
    }

    /// Bytes of a layer's slot.
    pub fn slot_bytes(&self, layout: &Layout) -> usize {
        match layout {
            Layout::Ep(_) => self.ep_bytes,
            Layout::Tp => self.tp_bytes,
            Layout::Groups(width) => self.group_bytes(*width).unwrap_or(0),
        }
    }

    /// `None` if there is no room for these groups.
    fn group_bytes(&self, width: usize) -> Option<usize> {
        self.groups.iter().find(|group| group.width == width).map(|group| group.bytes)
    }

    /// The range of a layer in every rank's buffer. Panics if there is no such layer.
    pub fn slot(&self, layout: &Layout, side: Side, layer: usize) -> Range<usize> {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        let bytes = self.slot_bytes(layout);
        let start = match side {
            Side::Low => layer * bytes,
            Side::High => self.bytes - (self.layers - layer) * bytes,
        };
        start..start + bytes
    }

    /// The part of every rank's buffer that a layout leaves free until the next switch: on N nodes under EP, all but
    /// 1/N.
    pub fn free(&self, layout: &Layout, side: Side) -> Range<usize> {
        let used = self.layers * self.slot_bytes(layout);
        match side {
            Side::Low => used..self.bytes,
            Side::High => 0..self.bytes - used,
        }
    }

    /// Checks that a layout belongs to this model and these ranks, and fits this buffer.
    ///
    /// # Errors
    /// Different experts, ranks or layers, or too many slots.
    pub fn check(&self, layout: &Layout) -> Result<(), ReshardError> {
        let hosts = match layout {
            Layout::Ep(hosts) => hosts,
            Layout::Tp if self.tp_bytes == 0 => return Err(ReshardError::EpOnly),
            Layout::Tp => return Ok(()),
            Layout::Groups(width) => {
                return self.group_bytes(*width).map(|_| ()).ok_or(ReshardError::NoGroups { width: *width });
            }
        };
        check_equal("experts of the layout", hosts.experts, self.experts)?;
        check_equal("ranks of the layout", hosts.ranks, self.grid.ranks())?;
        check_equal("layers of the layout", hosts.layers.len(), self.layers)?;
        if hosts.slots > self.slots {
            return Err(ReshardError::Slots { found: hosts.slots, limit: self.slots });
        }
        Ok(())
    }

    /// The experts that a rank has a part of in a layer, each with its position in the slot, in order.
    pub(super) fn hosted(&self, layout: &Layout, layer: usize, rank: usize) -> Vec<Hosted> {
        match layout {
            Layout::Tp | Layout::Groups(_) => {
                (0..self.experts).map(|expert| Hosted { expert: expert as u16, position: expert }).collect()
            }
            Layout::Ep(hosts) => {
                let slots = hosts.of_rank(layer, rank).iter().enumerate();
                let used = slots.filter(|(_, expert)| **expert != NO_HOST);
                used.map(|(position, &expert)| Hosted { expert, position }).collect()
            }
        }
    }

    /// The slices that a rank has of the experts it hosts.
    pub(super) fn slices(&self, layout: &Layout, rank: usize) -> Range<usize> {
        match layout {
            Layout::Ep(_) => 0..self.grid.width(),
            Layout::Tp => self.grid.local(rank)..self.grid.local(rank) + 1,
            Layout::Groups(width) => {
                let each = self.grid.width() / width;
                rank % width * each..(rank % width + 1) * each
            }
        }
    }

    /// The steps of an expert's width that a rank has of the experts it hosts.
    fn held(&self, layout: &Layout, rank: usize) -> Range<usize> {
        let steps = |slice| self.shape.steps(slice, self.grid.width());
        let slices = self.slices(layout, rank);
        steps(slices.start).start..steps(slices.end - 1).end
    }

    /// Appends the location of everything that a rank has of a layer to `parts`: by position in the slot, slice and
    /// array. For code that loads or reads experts. Panics if there is no such layer or rank.
    pub fn parts(&self, layout: &Layout, side: Side, layer: usize, rank: usize, parts: &mut Vec<Part>) {
        parts.clear();
        for hosted in self.hosted(layout, layer, rank) {
            for slice in self.slices(layout, rank) {
                let piece = PieceId { layer, expert: hosted.expert, slice: slice as u16 };
                parts.extend(self.parts_of(layout, side, piece, HostedAt { rank, position: hosted.position }));
            }
        }
    }

    /// The locations of a piece's arrays. A slice without columns has none.
    pub(super) fn parts_of(
        &self,
        layout: &Layout,
        side: Side,
        piece: PieceId,
        at: HostedAt,
    ) -> impl Iterator<Item = Part> {
        let steps = self.shape.steps(piece.slice.into(), self.grid.width());
        let held = self.held(layout, at.rank);
        let (first, of_step) = (steps.start.saturating_sub(held.start), held.len());
        let slot = Slot { layout, side, layer: piece.layer };
        let arrays = if steps.is_empty() { 0 } else { self.shape.arrays().len() };
        (0..arrays).map(move |array| {
            let ExpertArray { outer, inner_bytes } = self.shape.arrays()[array];
            let offset = self.array(slot, at.position, array, of_step).start + first * inner_bytes;
            let place = Place { rank: at.rank, offset, stride: of_step * inner_bytes };
            Part { piece, array, place, rows: outer, bytes: steps.len() * inner_bytes }
        })
    }

    /// The range of one array of everything that a rank has of the expert at this position of a slot: `[outer, steps,
    /// inner]`, for code that computes with it. Panics if there is no such layer or array.
    pub fn entry(&self, slot: Slot<'_>, rank: usize, position: usize, array: usize) -> Range<usize> {
        let steps = self.held(slot.layout, rank).len();
        self.array(slot, position, array, steps)
    }

    /// A slot has all arrays of the first expert, then those of the second one: a small batch reads an expert's arrays
    /// consecutively, which suits hardware prefetching.
    fn array(&self, slot: Slot<'_>, position: usize, array: usize, steps: usize) -> Range<usize> {
        let first = self.slot(slot.layout, slot.side, slot.layer).start;
        let expert = first + position * self.shape.first_bytes(self.shape.arrays().len(), steps);
        let start = expert + self.shape.first_bytes(array, steps);
        start..start + self.shape.part_bytes(array, steps)
    }
}

/// A layer's slot in every rank's buffer.
#[derive(Clone, Copy, Debug)]
pub struct Slot<'a> {
    /// How the layer's experts are laid out.
    pub layout: &'a Layout,
    /// The end of the buffer that the layout occupies.
    pub side: Side,
    /// The layer.
    pub layer: usize,
}

/// The location of rows in a rank's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The rank whose buffer it is.
    pub rank: usize,
    /// The first byte of the first row.
    pub offset: usize,
    /// Distance between the first bytes of consecutive rows.
    pub stride: usize,
}

/// One array's part of a slice of an expert, as stored in a rank's buffer: rows of equal length at equal distances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Layer, expert, slice.
    pub piece: PieceId,
    /// Index of the array.
    pub array: usize,
    /// Location of the first row.
    pub place: Place,
    /// Number of rows.
    pub rows: usize,
    /// Bytes per row.
    pub bytes: usize,
}

/// A rank's slot entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostedAt {
    pub(super) rank: usize,
    pub(super) position: usize,
}

/// An expert in a rank's slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Hosted {
    pub(super) expert: u16,
    pub(super) position: usize,
}

const _: () = assert!(MAX_IDS == NO_HOST as usize, "the id of no expert is the one past the last");
