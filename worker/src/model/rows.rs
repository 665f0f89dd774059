//! Assigns a step's rows to ranks in each layer, with attention tp: Algorithm 3 of the paper, lines 2 to 6.
//!
//! Every rank has the same tokens and the same routes from previous layers, so all ranks compute the same split without
//! communication. The tables implement line 2 ([`Tables::group_shares`]: T by token, A by the groups of the token's
//! previous two layers) and line 5, `align` ([`EvenGroups`]: no rank gets more than an even part of the rows, because
//! collectives wait for the fullest rank).

use std::sync::Arc;

use semmoe_kernels::{RankOrder, RowSplit, argsort_by_rank, even_offsets};
use semmoe_tables::{EvenGroups, ExpertId, GroupId, LayerIdx, PlacedBy, Tables, TokenId};

use crate::ep::RowCounts;

/// The split of the current layer; reused between layers.
pub(super) struct RowPlan {
    ranks: usize,
    /// Tables that determine the shuffle. Without tables, rows keep their order and are split evenly.
    tables: Option<Arc<Tables>>,
    shuffled: bool,
    /// `[ranks + 1]`: offsets of an even split.
    offsets: Vec<u32>,
    order: RankOrder,
    even: EvenGroups,
    /// Number of one token's activations on each group.
    activations: Vec<u32>,
}

/// The inputs from a step that determine its split.
#[derive(Clone, Copy)]
pub(super) struct PlanInput<'a> {
    /// `[rows]`
    pub(super) tokens: &'a [u32],
    /// `[rows, L, k]`: routes from the previous layers.
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

    /// Splits a layer's rows; `layer` is `None` for a dense layer.
    pub(super) fn split(&mut self, layer: Option<LayerIdx>, input: PlanInput<'_>) {
        self.shuffled = false;
        match (self.tables.clone(), layer) {
            (Some(tables), Some(layer)) => self.shuffle(&tables, layer, input),
            _ => {
                self.offsets =
                    even_offsets(input.tokens.len(), self.ranks).expect("a step's row count fits in 32 bits");
            }
        }
    }

    /// Whether splits depend on the routes from previous layers.
    pub(super) fn reads_routes(&self) -> bool {
        self.tables.is_some()
    }

    /// The last split.
    pub(super) fn current(&self) -> RowSplit<'_> {
        match self.shuffled {
            true => RowSplit::from(&self.order),
            false => RowSplit::contiguous(&self.offsets).expect("even offsets ascend from 0"),
        }
    }

    /// Returns a rank's row counts in the current split.
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
        argsort_by_rank(self.even.groups(), self.ranks, &mut self.order).expect("the tables have one group per rank");
        self.shuffled = true;
    }

    /// Returns a token's main groups in the previous two MoE layers, older first, or `None` if there are fewer than
    /// two. `routes` is `[L, k]`.
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
