//! The current placement of experts: the cost of moving them, and the relabelling of groups that moves the fewest.

use semmoe_tables::{LayerIdx, Profile};

use crate::input::{Problem, SolveError, SolveOptions, WarmStart, once_each, with_empty_slots, within};
use crate::step::clustering::{Clustering, Limits};
use crate::step::topology::Topology;
use crate::step::transport::{Plan, Stop, assign_evenly};
use crate::step::unit_step::PROFIT_ONE;

impl WarmStart {
    /// Checks that the tables belong to the profile's model and have the same number of groups.
    pub(crate) fn check(&self, profile: &Profile, options: &SolveOptions) -> Result<(), SolveError> {
        within("migration_cost", self.migration_cost, 0.0, 1e9, "a number from 0 to 1e9")?;
        self.tables.model().check_compatible(profile.model())?;
        let other = |found, expected: String| Err(SolveError::OtherShape { what: "the warm start", found, expected });
        if self.tables.groups() != options.groups {
            return other(format!("{} groups", self.tables.groups()), options.groups.to_string());
        }
        let experts = self.tables.model().num_experts;
        if let Some(slots) = self.tables.physical_to_logical() {
            if !once_each(slots, self.tables.placement()) {
                let why = "the cost of a move is defined only for experts without replicas";
                return Err(SolveError::Together { one: "a warm start", other: "tables with replicas", why });
            }
            if slots.slots() != options.slots(experts) {
                return other(format!("{} slots a layer", slots.slots()), options.slots(experts).to_string());
            }
        }
        self.check_gating(options)
    }

    /// Checks that gating groups are intact in the tables.
    fn check_gating(&self, options: &SolveOptions) -> Result<(), SolveError> {
        let topology = Topology::new(options, self.tables.model().num_experts)?;
        let each = usize::from(self.tables.model().num_experts) / topology.gating_groups;
        let cell = |group: u16| topology.cell(group.into());
        let torn = |layer: u16| {
            let mut gating = self.tables.placement().layer(LayerIdx::new(layer)).chunks_exact(each);
            gating.any(|groups| groups.iter().any(|&group| cell(group) != cell(groups[0])))
        };
        if topology.gating_groups > 1 && (0..self.tables.model().layers() as u16).any(torn) {
            let why = "the tables split up gating groups, but every expert's current group must be allowed";
            return Err(SolveError::Together { one: "a warm start from these tables", other: "gating groups", why });
        }
        Ok(())
    }

    /// Returns the current placement for each problem.
    pub(crate) fn placements(&self, problems: &[Problem]) -> Vec<CurrentPlacement> {
        let mut layers = LayerIdx::all(self.tables.model().layers());
        let current = |problem: &Problem| {
            let (slots, placement) = (problem.experts, self.tables.placement());
            let layers = layers.by_ref().take(problem.layers);
            let of_layer = |layer| with_empty_slots(placement.layer(layer), slots, placement.groups());
            let group_of = layers.flat_map(of_layer).collect();
            CurrentPlacement::new(problem, group_of, usize::from(placement.experts()), self.migration_cost)
        };
        problems.iter().map(current).collect()
    }
}

/// The current group of each column of a problem, and the cost of leaving it.
#[derive(Clone, Debug)]
pub(crate) struct CurrentPlacement {
    /// S: N plus, with padding, the empty slots, which have no current group.
    slots: usize,
    /// N
    experts: usize,
    /// [L * S]
    pub(crate) group_of: Vec<u16>,
    /// [L] activations that moving an expert must gain: C times the layer's activations over N.
    cost: Vec<f64>,
    /// Activations of all layers: an upper bound on the gain of any move.
    most: f64,
}

impl CurrentPlacement {
    pub(crate) fn new(problem: &Problem, group_of: Vec<u16>, experts: usize, migration_cost: f64) -> Self {
        let slots = problem.experts;
        let layers = problem.column_load.chunks_exact(slots);
        let cost = layers.map(|load| migration_cost * load.iter().sum::<u64>() as f64 / experts as f64);
        let most = problem.total_activations() as f64;
        CurrentPlacement { slots, experts, group_of, cost: cost.map(|cost| cost.min(most)).collect(), most }
    }

    /// Returns the number of moved experts per layer, [L].
    pub(crate) fn moved(&self, group_of: &[u16]) -> Vec<u64> {
        let layers = self.group_of.chunks_exact(self.slots).zip(group_of.chunks_exact(self.slots));
        let differ = |(current, now): (&[u16], &[u16])| {
            current.iter().zip(now).take(self.experts).filter(|(current, now)| current != now).count() as u64
        };
        layers.map(differ).collect()
    }

    /// Returns the migration cost of a placement in the unit of a plan's value (fixed-point activations).
    pub(crate) fn penalty(&self, group_of: &[u16]) -> i128 {
        let each = |(moved, cost): (u64, &f64)| i128::from(moved) * (cost * PROFIT_ONE).round() as i128;
        self.moved(group_of).into_iter().zip(&self.cost).map(each).sum()
    }

    /// Returns the cost, in activations, of moving a column between groups; negative if it returns to its current
    /// group.
    pub(crate) fn change(&self, column: usize, from: usize, to: usize) -> f64 {
        if column % self.slots >= self.experts {
            return 0.0;
        }
        let current = usize::from(self.group_of[column]);
        self.cost[column / self.slots] * f64::from(i8::from(to != current) - i8::from(from != current))
    }

    /// Subtracts the cost of leaving the current group from the gains [N, G] of a layer. The cost is never zero, so
    /// ties keep an expert in place.
    pub(crate) fn charge(&self, layer: usize, gain: &mut [i64], groups: usize, fraction_bits: u32) {
        let one = (1u64 << fraction_bits) as f64;
        let cost = (self.cost[layer].min(self.most) * one).round().max(1.0) as i64;
        let current = &self.group_of[layer * self.slots..layer * self.slots + self.experts];
        for (row, &current) in gain.chunks_exact_mut(groups).zip(current) {
            let others = row.iter_mut().enumerate().filter(|(group, _)| *group != usize::from(current));
            others.for_each(|(_, gain)| *gain -= cost);
        }
    }

    /// Relabels the groups of a clustering so that as many experts as possible stay. Groups of one cell (node) stay in
    /// one cell, so nothing else changes. If stopped, the groups keep their labels.
    pub(crate) fn relabelled(&self, found: Clustering, limits: &Limits, stop: Stop<'_>) -> Clustering {
        let groups = limits.groups;
        let mut stays = vec![0i64; groups * groups];
        for (column, (&now, &current)) in found.group_of.iter().zip(&self.group_of).enumerate() {
            stays[usize::from(now) * groups + usize::from(current)] += i64::from(column % self.slots < self.experts);
        }
        let renamed = match cell_by_cell(&stays, groups, limits.topology.per_cell, stop) {
            Some(label) => found.renamed(&label),
            None => found,
        };
        Clustering { penalty: self.penalty(&renamed.group_of), ..renamed }
    }
}

/// Returns the optimal new label of each group for `stays` [old label, new label]: matches the groups within every pair
/// of cells and then, by the resulting values, the cells.
fn cell_by_cell(stays: &[i64], groups: usize, per_cell: usize, stop: Stop<'_>) -> Option<Vec<u16>> {
    let cells = groups / per_cell;
    let within = |from: usize, to: usize| {
        let row = |group: usize| &stays[group * groups + to * per_cell..group * groups + (to + 1) * per_cell];
        let rows: Vec<i64> = (from * per_cell..(from + 1) * per_cell).flat_map(|group| row(group).to_vec()).collect();
        assign_evenly(&rows, per_cell, None, stop)
    };
    let pairs: Vec<Plan> = (0..cells * cells).map(|pair| within(pair / cells, pair % cells)).collect::<Option<_>>()?;
    let values: Vec<i64> = pairs.iter().map(|pair| pair.primal as i64).collect();
    let of_cells = assign_evenly(&values, cells, None, stop)?;
    let of_cell = |(from, &to): (usize, &u16)| {
        let pair = &pairs[from * cells + usize::from(to)];
        pair.label.iter().map(move |label| to * per_cell as u16 + label).collect::<Vec<_>>()
    };
    Some(of_cells.label.iter().enumerate().flat_map(of_cell).collect())
}

#[cfg(test)]
mod tests;
