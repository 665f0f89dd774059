//! Which rows of a step go to which rank in a layer, with attention tp: Algorithm 3 of the paper, lines 2 to 6.
//!
//! Every rank has the same tokens and the same routes of the previous layers, so all of them compute the same split
//! without communication. Line 2 is the tables' own rule ([`Tables::group_shares`]: T of the token, A of the groups of
//! its previous two layers), and so is line 5, `align` ([`EvenGroups`]: no rank gets more rows than its part, because
//! collectives wait for the fullest).

use std::sync::Arc;

use semmoe_kernels::{RankOrder, RowSplit, argsort_by_rank, even_offsets};
use semmoe_tables::{EvenGroups, ExpertId, GroupId, LayerIdx, PlacedBy, Tables, TokenId};

use crate::ep::RowCounts;

/// The split of the current layer; reused between layers.
pub(super) struct RowPlan {
    ranks: usize,
    /// The tables that shuffle rows; without them rows keep their order and are split evenly.
    tables: Option<Arc<Tables>>,
    shuffled: bool,
    /// Offsets of even parts: `[ranks + 1]`.
    offsets: Vec<u32>,
    order: RankOrder,
    even: EvenGroups,
    /// Activations of one token on each group.
    activations: Vec<u32>,
}

/// The tokens of a step, as the split needs them.
#[derive(Clone, Copy)]
pub(super) struct PlanInput<'a> {
    /// `[rows]`
    pub(super) tokens: &'a [u32],
    /// `[rows, L, k]`: routes of the previous layers.
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
            even: EvenGroups::new(ranks as u16),
            activations: Vec::new(),
        }
    }

    /// Splits the rows of a layer; `layer` is `None` if it has no experts.
    pub(super) fn split(&mut self, layer: Option<LayerIdx>, input: PlanInput<'_>) {
        self.shuffled = false;
        match (self.tables.clone(), layer) {
            (Some(tables), Some(layer)) => self.shuffle(&tables, layer, input),
            _ => {
                self.offsets =
                    even_offsets(input.tokens.len(), self.ranks).expect("a step's rows are counted in 32 bits");
            }
        }
    }

    /// The last split.
    pub(super) fn current(&self) -> RowSplit<'_> {
        match self.shuffled {
            true => RowSplit::from(&self.order),
            false => RowSplit::contiguous(&self.offsets).expect("even offsets ascend from 0"),
        }
    }

    /// The counts of the split for a rank.
    pub(super) fn counts(&self, rank: usize) -> RowCounts {
        let split = self.current();
        let positions = split.positions(rank);
        if !self.shuffled {
            let fullest = self.offsets.windows(2).map(|part| u64::from(part[1] - part[0])).max().unwrap_or(0);
            let evenly = positions.len() as u64;
            return RowCounts { evenly, fullest, fullest_wanted: fullest, ..Default::default() };
        }
        let (fullest, fullest_wanted) = (u64::from(self.even.fullest()), u64::from(self.even.fullest_wanted()));
        let mut counts = RowCounts { fullest, fullest_wanted, ..Default::default() };
        for position in positions {
            *match self.even.placed_by(split.token(position)) {
                PlacedBy::Share => &mut counts.by_tables,
                PlacedBy::Evening => &mut counts.moved,
                PlacedBy::Room => &mut counts.evenly,
            } += 1;
        }
        counts
    }

    fn shuffle(&mut self, tables: &Tables, layer: LayerIdx, input: PlanInput<'_>) {
        self.even.clear();
        let width = input.routes.len() / input.tokens.len().max(1);
        for (row, &token) in input.tokens.iter().enumerate() {
            let routes = &input.routes[row * width..][..width];
            let before = self.groups_before(tables, layer, routes, input.top_k);
            self.even.push(|shares| tables.group_shares(layer, TokenId::new(token), before, shares));
        }
        self.even.settle();
        argsort_by_rank(self.even.groups(), self.ranks, &mut self.order).expect("groups of the tables are ranks");
        self.shuffled = true;
    }

    /// A token's groups in the previous two MoE layers, older first; `routes` is `[L, k]`.
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
