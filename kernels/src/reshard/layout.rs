//! Expert layouts: which experts each rank hosts, and where each layer's slot starts in the buffer.

use std::ops::Range;

use super::checksum::PieceId;
use super::error::ReshardError;
use super::shape::{ExpertArray, ExpertShape, MAX_IDS, check_count, check_equal};
use crate::nodes::NodeGrid;
use crate::split::even_part;

/// Marks an empty expert slot.
pub const NO_HOST: u16 = u16::MAX;

/// The experts that each host has in each layer: any placement E, including replicas and empty slots. A host is a rank,
/// or a node whose ranks share the experts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hosts {
    experts: usize,
    count: usize,
    /// S: slots per host
    slots: usize,
    /// `[K][hosts x S]`
    layers: Vec<Vec<u16>>,
}

impl Hosts {
    /// Creates a placement from `layers`, `[K][count x S]`: a layer lists the S experts of host 0, then those of host
    /// 1, and so on, with [`NO_HOST`] for empty slots.
    ///
    /// # Errors
    /// If the layers differ in length or do not split evenly over the hosts, or an expert is out of range, on one host
    /// twice, or on no host.
    pub fn new(experts: usize, count: usize, layers: Vec<Vec<u16>>) -> Result<Self, ReshardError> {
        check_count("experts", experts)?;
        check_count("hosts", count)?;
        let all = layers.first().map_or(0, Vec::len);
        if !all.is_multiple_of(count) {
            return Err(ReshardError::Divides { what: "expert slots per layer", found: all, divisor: count });
        }
        let slots = all / count;
        check_count("expert slots per host", slots)?;
        let hosts = Self { experts, count, slots, layers };
        for layer in 0..hosts.layers.len() {
            hosts.check(layer)?;
        }
        Ok(hosts)
    }

    /// Assigns experts to hosts in order and as evenly as possible: the first `experts % count` hosts have one more.
    ///
    /// # Errors
    /// See [`Hosts::new`].
    pub fn contiguous(experts: usize, count: usize, layers: usize) -> Result<Self, ReshardError> {
        check_count("experts", experts)?;
        check_count("hosts", count)?;
        let slots = experts.div_ceil(count);
        let mut layer = vec![NO_HOST; slots * count];
        for (host, hosted) in layer.chunks_exact_mut(slots).enumerate() {
            let (first, end) = (even_part(experts, count, host), even_part(experts, count, host + 1));
            hosted.iter_mut().zip(first..end).for_each(|(slot, expert)| *slot = expert as u16);
        }
        Self::new(experts, count, vec![layer; layers])
    }

    fn check(&self, layer: usize) -> Result<(), ReshardError> {
        let row = &self.layers[layer];
        check_equal("expert slots per layer", row.len(), self.slots * self.count)?;
        // For each expert, 1 plus the last host found to have it; 0 if none was found yet.
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

    /// Returns S, the number of expert slots per host.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the number of hosts.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the experts that a host has in a layer, `[S]`. Panics if there is no such layer or host.
    pub fn of_host(&self, layer: usize, host: usize) -> &[u16] {
        &self.layers[layer][host * self.slots..(host + 1) * self.slots]
    }
}

/// How experts are divided over ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Layout {
    /// Each rank has some complete experts.
    Ep(Hosts),
    /// Each rank has its slice of every expert; each node has all slices.
    Tp,
    /// TP within groups of this many consecutive ranks: each group has all experts, and each rank has consecutive
    /// slices of them.
    Groups(usize),
    /// TP within nodes of consecutive ranks that host different experts: each rank has consecutive slices of its node's
    /// experts.
    Hybrid(Hosts),
}

impl Layout {
    /// Returns the hosts of experts; `None` if every group of ranks has all experts.
    pub fn hosts(&self) -> Option<&Hosts> {
        match self {
            Self::Ep(hosts) | Self::Hybrid(hosts) => Some(hosts),
            Self::Tp | Self::Groups(_) => None,
        }
    }
}

/// The end of the buffer that a layout occupies; the rest is spare space for the next switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Layer i starts i slots after the start of the buffer.
    Low,
    /// Layer i starts K - i slots before the end of the buffer.
    High,
}

impl Side {
    /// Returns the side that a layout occupies after a switch.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Low => Self::High,
            Self::High => Self::Low,
        }
    }
}

/// The geometry of a rank's buffer, equal on all ranks: K slots of any supported layout, plus one spare slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    pub(super) shape: ExpertShape,
    pub(super) grid: NodeGrid,
    pub(super) experts: usize,
    layers: usize,
    slots: usize,
    ep_bytes: usize,
    tp_bytes: usize,
    /// Slot sizes for the group widths that the buffer has room for.
    groups: Vec<SharedSlot>,
    /// Slot sizes for the widths of hybrid nodes that the buffer has room for.
    nodes: Vec<SharedSlot>,
    bytes: usize,
}

/// The size of a layer's slot if `width` consecutive ranks share at most `experts` experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SharedSlot {
    width: usize,
    experts: usize,
    bytes: usize,
}

impl Pool {
    /// Sizes a buffer for `experts` experts in each of `layers` layers, with up to `slots` expert slots per rank under
    /// EP (including replicas and empty slots).
    ///
    /// # Errors
    /// If a count is 0 or above 65,535, the slots cannot hold all experts, or the size exceeds the address space.
    pub fn new(
        shape: ExpertShape,
        grid: NodeGrid,
        experts: usize,
        layers: usize,
        slots: usize,
    ) -> Result<Self, ReshardError> {
        for (what, found) in [("experts", experts), ("layers", layers), ("expert slots per rank", slots)] {
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
        let (groups, nodes) = (Vec::new(), Vec::new());
        Ok(Self { shape, grid, experts, layers, slots, ep_bytes, tp_bytes, groups, nodes, bytes })
    }

    /// Also makes room for groups of these widths. The buffer then has `K S + X` bytes, where S is the largest slot of
    /// any layout and X the second largest, but at least one EP slot.
    ///
    /// # Errors
    /// If a width does not divide the number of ranks per node, or the size exceeds the address space.
    pub fn with_groups(mut self, widths: &[usize]) -> Result<Self, ReshardError> {
        for &width in widths {
            let slot = self.shared_slot(width, self.experts)?;
            self.groups.push(slot);
        }
        self.resized()
    }

    /// Also makes room for hybrid nodes of these widths, each with at most as many experts as fit into its ranks' slots
    /// under EP. The buffer's size follows the formula of [`Pool::with_groups`].
    ///
    /// # Errors
    /// If a width does not divide the number of ranks per node, or the size exceeds the address space.
    pub fn with_hybrid(mut self, widths: &[usize]) -> Result<Self, ReshardError> {
        for &width in widths {
            let slot = self.shared_slot(width, self.slots.saturating_mul(width).min(self.experts))?;
            self.nodes.push(slot);
        }
        self.resized()
    }

    fn shared_slot(&self, width: usize, experts: usize) -> Result<SharedSlot, ReshardError> {
        let slices = self.grid.width();
        if width == 0 || !slices.is_multiple_of(width) {
            return Err(ReshardError::Divides { what: "ranks per node", found: slices, divisor: width });
        }
        let widest = (0..width).map(|local| self.steps(width, local).len()).max().unwrap_or(0);
        let expert = self.shape.first_bytes(self.shape.arrays().len(), widest);
        let bytes = expert.checked_mul(experts).ok_or(ReshardError::TooLarge)?;
        Ok(SharedSlot { width, experts, bytes })
    }

    /// Resizes the buffer for a switch between any two layouts, including two placements in one layout.
    fn resized(mut self) -> Result<Self, ReshardError> {
        let placed = self.nodes.iter().map(|slot| slot.bytes).chain([self.ep_bytes]);
        let mut slots: Vec<usize> = placed.flat_map(|bytes| [bytes; 2]).collect();
        slots.extend(self.groups.iter().map(|slot| slot.bytes).chain([self.tp_bytes]));
        slots.sort_unstable_by_key(|&bytes| std::cmp::Reverse(bytes));
        let bytes = slots[0].checked_mul(self.layers).and_then(|bytes| bytes.checked_add(slots[1]));
        self.bytes = bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or(ReshardError::TooLarge)?;
        Ok(self)
    }

    /// Limits the buffer to EP-to-EP switches: it then has K + 1 EP slots, which on N nodes is 1/N of what TP needs.
    #[must_use]
    pub fn ep_only(self) -> Self {
        Self { tp_bytes: 0, bytes: (self.layers + 1) * self.ep_bytes, ..self }
    }

    /// Returns the size of each rank's buffer: `K max(T, X) + X`, where T and X are the bytes of a TP slot and an EP
    /// slot. With groups it is larger, see [`Pool::with_groups`].
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
            Layout::Hybrid(hosts) => self.node_slot(hosts).map_or(0, |slot| slot.bytes),
        }
    }

    /// Returns the slot size for groups of `width` ranks, or `None` if the buffer has no room for them.
    fn group_bytes(&self, width: usize) -> Option<usize> {
        self.groups.iter().find(|group| group.width == width).map(|group| group.bytes)
    }

    /// Returns the slot for these hybrid nodes, or `None` if the buffer has no room for them.
    fn node_slot(&self, hosts: &Hosts) -> Option<&SharedSlot> {
        self.nodes.iter().find(|slot| slot.width * hosts.count == self.grid.ranks())
    }

    /// Returns the number of consecutive ranks that share experts; 1 under EP.
    pub fn width(&self, layout: &Layout) -> usize {
        match layout {
            Layout::Ep(_) => 1,
            Layout::Tp => self.grid.width(),
            Layout::Groups(width) => *width,
            Layout::Hybrid(hosts) => self.grid.ranks() / hosts.count,
        }
    }

    /// Returns a layer's byte range in every rank's buffer. Panics if there is no such layer.
    pub fn slot(&self, layout: &Layout, side: Side, layer: usize) -> Range<usize> {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        let bytes = self.slot_bytes(layout);
        let start = match side {
            Side::Low => layer * bytes,
            Side::High => self.bytes - (self.layers - layer) * bytes,
        };
        start..start + bytes
    }

    /// Returns the part of every rank's buffer that a layout leaves free until the next switch. Under EP on N nodes, it
    /// is all but about 1/N of the buffer.
    pub fn free(&self, layout: &Layout, side: Side) -> Range<usize> {
        let used = self.layers * self.slot_bytes(layout);
        match side {
            Side::Low => used..self.bytes,
            Side::High => 0..self.bytes - used,
        }
    }

    /// Checks that a layout matches this model and these ranks and fits this buffer.
    ///
    /// # Errors
    /// If the number of experts, ranks or layers differs, or the buffer has no room for the layout.
    pub fn check(&self, layout: &Layout) -> Result<(), ReshardError> {
        let (hosts, ranks, limit) = match layout {
            Layout::Ep(hosts) => (hosts, self.grid.ranks(), self.slots),
            Layout::Hybrid(hosts) => {
                let slot = self.node_slot(hosts).ok_or(ReshardError::NoHybrid { nodes: hosts.count })?;
                (hosts, hosts.count, slot.experts)
            }
            Layout::Tp if self.tp_bytes == 0 => return Err(ReshardError::EpOnly),
            Layout::Tp => return Ok(()),
            Layout::Groups(width) => {
                return self.group_bytes(*width).map(|_| ()).ok_or(ReshardError::NoGroups { width: *width });
            }
        };
        check_equal("experts of the layout", hosts.experts, self.experts)?;
        check_equal("ranks of the layout", hosts.count, ranks)?;
        check_equal("layers of the layout", hosts.layers.len(), self.layers)?;
        if hosts.slots > limit {
            return Err(ReshardError::Slots { found: hosts.slots, limit });
        }
        Ok(())
    }

    /// Returns the experts of a layer that a rank hosts in whole or in part, in slot order, each with its position in
    /// the slot.
    pub(super) fn hosted(&self, layout: &Layout, layer: usize, rank: usize) -> Vec<Hosted> {
        let Some(hosts) = layout.hosts() else {
            return (0..self.experts).map(|expert| Hosted { expert: expert as u16, position: expert }).collect();
        };
        let slots = hosts.of_host(layer, rank / self.width(layout)).iter().enumerate();
        let used = slots.filter(|(_, expert)| **expert != NO_HOST);
        used.map(|(position, &expert)| Hosted { expert, position }).collect()
    }

    /// Returns the slices that a rank stores of each expert it hosts.
    pub(super) fn slices(&self, layout: &Layout, rank: usize) -> Range<usize> {
        self.slices_of(self.width(layout), rank)
    }

    /// Returns a rank's slices if `width` consecutive ranks share experts.
    fn slices_of(&self, width: usize, rank: usize) -> Range<usize> {
        let each = self.grid.width() / width;
        rank % width * each..(rank % width + 1) * each
    }

    /// Returns the steps of an expert's width that a rank has if `width` consecutive ranks share experts.
    fn steps(&self, width: usize, rank: usize) -> Range<usize> {
        let steps = |slice| self.shape.steps(slice, self.grid.width());
        let slices = self.slices_of(width, rank);
        steps(slices.start).start..steps(slices.end - 1).end
    }

    /// Returns the width steps that a rank stores of each expert it hosts.
    fn held(&self, layout: &Layout, rank: usize) -> Range<usize> {
        self.steps(self.width(layout), rank)
    }

    /// Fills `parts` with the locations of everything that a rank stores for a layer, ordered by position in the slot,
    /// slice and array. Meant for code that loads or reads experts. Panics if there is no such layer or rank.
    pub fn parts(&self, layout: &Layout, side: Side, layer: usize, rank: usize, parts: &mut Vec<Part>) {
        parts.clear();
        for hosted in self.hosted(layout, layer, rank) {
            for slice in self.slices(layout, rank) {
                let piece = PieceId { layer, expert: hosted.expert, slice: slice as u16 };
                parts.extend(self.parts_of(layout, side, piece, HostedAt { rank, position: hosted.position }));
            }
        }
    }

    /// Returns the locations of a piece's arrays. A slice without columns has none.
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

    /// Returns the byte range of one array, `[outer, steps, inner]`, of the expert at this position of a rank's slot,
    /// for code that computes with it. Panics if there is no such layer or array.
    pub fn entry(&self, slot: Slot<'_>, rank: usize, position: usize, array: usize) -> Range<usize> {
        let steps = self.held(slot.layout, rank).len();
        self.array(slot, position, array, steps)
    }

    /// Returns an array's byte range. A slot stores all arrays of the first expert, then those of the second, and so
    /// on: small batches read an expert's arrays consecutively, which suits hardware prefetching.
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
    /// The rank that owns the buffer.
    pub rank: usize,
    /// Offset of the first row.
    pub offset: usize,
    /// Distance in bytes between the starts of consecutive rows.
    pub stride: usize,
}

/// One array's part of an expert slice, as stored in a rank's buffer: rows of equal length at a fixed stride.
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

const _: () = assert!(MAX_IDS == NO_HOST as usize, "NO_HOST is the lowest id that no expert can have");
