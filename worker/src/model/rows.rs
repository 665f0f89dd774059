//! Which rows of a step go to which rank in a layer, with attention tp: Algorithm 3 of the paper, lines 2 to 6.
//!
//! Every rank has the same tokens and the same routes of the layers before, so that all of them come to the same split without
//! a word. Line 2 is the tables' own rule ([`Tables::likeliest_group`]: T of the token, A of the groups of its two layers before).

use std::sync::Arc;

use semmoe_kernels::{RankOrder, RowSplit, argsort_by_rank, even_offsets};
use semmoe_tables::{ExpertId, GroupId, LayerIdx, Tables, TokenId};

/// The split of the layer that is being computed; reused between layers.
pub(super) struct RowPlan {
    ranks: usize,
    /// By what rows are shuffled; without them they stay in their order, in even parts.
    tables: Option<Arc<Tables>>,
    shuffled: bool,
    /// Of even parts: `[ranks + 1]`.
    offsets: Vec<u32>,
    order: RankOrder,
    /// `[rows]`
    destinations: Vec<u16>,
    /// Whether the tables said where to put each row: `[rows]`.
    known: Vec<bool>,
    /// Rows of each rank so far.
    counts: Vec<u32>,
    /// Activations of one token on each group.
    activations: Vec<u32>,
}

/// The tokens of a step, as a plan needs them.
#[derive(Clone, Copy)]
pub(super) struct PlanInput<'a> {
    /// `[rows]`
    pub(super) tokens: &'a [u32],
    /// `[rows, L, k]`, of the layers before.
    pub(super) routes: &'a [u16],
    pub(super) top_k: usize,
}

impl RowPlan {
    pub(super) fn new(ranks: usize, tables: Option<Arc<Tables>>) -> Self {
        Self {
            ranks,
            tables,
            shuffled: false,
            offsets: vec![0; ranks + 1],
            order: RankOrder::default(),
            destinations: Vec::new(),
            known: Vec::new(),
            counts: Vec::new(),
            activations: Vec::new(),
        }
    }

    /// Splits the rows of a layer; `layer` is `None` where it has no experts.
    pub(super) fn split(&mut self, layer: Option<LayerIdx>, input: PlanInput<'_>) {
        self.known.clear();
        self.known.resize(input.tokens.len(), false);
        self.shuffled = false;
        match (self.tables.clone(), layer) {
            (Some(tables), Some(layer)) => self.shuffle(&tables, layer, input),
            _ => {
                self.offsets =
                    even_offsets(input.tokens.len(), self.ranks).expect("a step's rows are counted in 32 bits");
            }
        }
    }

    /// The split that was made last.
    pub(super) fn current(&self) -> RowSplit<'_> {
        match self.shuffled {
            true => RowSplit::from(&self.order),
            false => RowSplit::contiguous(&self.offsets).expect("even offsets ascend from 0"),
        }
    }

    /// Rows that the split gives a rank: those that the tables placed, and those that went where there was room.
    pub(super) fn placed(&self, rank: usize) -> (u64, u64) {
        let split = self.current();
        let positions = split.positions(rank);
        let all = positions.len() as u64;
        let known = positions.filter(|&position| self.known[split.token(position)]).count() as u64;
        (known, all - known)
    }

    fn shuffle(&mut self, tables: &Tables, layer: LayerIdx, input: PlanInput<'_>) {
        self.destinations.clear();
        self.counts.clear();
        self.counts.resize(self.ranks, 0);
        let width = input.routes.len() / input.tokens.len().max(1);
        for (row, &token) in input.tokens.iter().enumerate() {
            let routes = &input.routes[row * width..][..width];
            let before = self.groups_before(tables, layer, routes, input.top_k);
            let likely = tables.likeliest_group(layer, TokenId::new(token), before);
            let rank = likely.map_or(0, |likely| likely.group.get());
            self.known[row] = likely.is_some();
            self.destinations.push(rank);
            self.counts[usize::from(rank)] += u32::from(likely.is_some());
        }
        // What nothing is known of goes where the fewest rows are, in the order of rows.
        for (destination, _) in self.destinations.iter_mut().zip(&self.known).filter(|(_, known)| !**known) {
            let rank = (1..self.ranks)
                .fold(0, |least, rank| if self.counts[rank] < self.counts[least] { rank } else { least });
            self.counts[rank] += 1;
            *destination = rank as u16;
        }
        argsort_by_rank(&self.destinations, self.ranks, &mut self.order).expect("groups of the tables are ranks");
        self.shuffled = true;
    }

    /// A token's groups in the two MoE layers before, older first; `routes` is `[L, k]`.
    fn groups_before(
        &mut self,
        tables: &Tables,
        layer: LayerIdx,
        routes: &[u16],
        top_k: usize,
    ) -> Option<(GroupId, GroupId)> {
        let older = layer.index().checked_sub(2)?;
        let mut main = |layer: usize| {
            let experts = routes[layer * top_k..][..top_k].iter().map(|&expert| ExpertId::new(expert));
            tables.placement().main_group(LayerIdx::new(layer as u16), experts, &mut self.activations)
        };
        Some((main(older), main(older + 1)))
    }
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
