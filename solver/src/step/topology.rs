//! Relations between groups: the nodes that contain them, and gating groups of experts that stay together.
//!
//! With M nodes, an activation on the unit's own group costs nothing, one on another group of its node costs 1, and one
//! on another node costs X. Minimum cost means maximum total value
//!
//! ```text
//! V(c, g) = 1 if c = g,  1 - 1/X if c and g are on one node,  0 otherwise        cost = X (1 - V)
//! ```
//!
//! which replaces `[c = g]` everywhere. Both exact steps are unchanged, since their profits are linear in the counts: a
//! unit's profit on group c is its activations on every group times V, and an expert's gain in group g is the
//! activations by every group's units times V.

use crate::input::{Nodes, SolveError, SolveOptions, within};
use crate::step::gating::MAX_GATING_GROUPS;

/// The groups, and the cells of consecutive groups that they form.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Topology {
    /// Groups per cell. Without nodes and gating groups, all groups are in one cell.
    pub(crate) per_cell: usize,
    /// The value of an activation on another group of the cell; zero if cells are not nodes.
    pub(crate) near: f64,
    /// Number of gating groups, each of consecutive experts that stay in one cell; 1 = no constraint.
    pub(crate) gating_groups: usize,
}

impl Topology {
    /// Creates a topology in which all groups are equal and experts are unconstrained.
    pub(crate) fn flat(groups: usize) -> Self {
        Topology { per_cell: groups, near: 0.0, gating_groups: 1 }
    }

    /// Reads the topology from the options, for N experts and groups that divide them.
    pub(crate) fn new(options: &SolveOptions, experts: u16) -> Result<Self, SolveError> {
        let (groups, gating_groups) = (options.groups, options.gating_groups.max(1));
        let mut topology = Topology::flat(usize::from(groups));
        if let Some(Nodes { nodes, inter_cost }) = options.nodes {
            check_nodes(nodes, groups)?;
            within("inter_cost", inter_cost, 1.0, 1e6, "a number from 1 to 1e6")?;
            topology.per_cell = usize::from(groups / nodes);
            topology.near = 1.0 - 1.0 / inter_cost;
        }
        if gating_groups == 1 {
            return Ok(topology);
        }
        let cells = |n: u16| match options.nodes {
            Some(Nodes { nodes, .. }) => n.is_multiple_of(nodes).then_some(nodes),
            None if n.is_multiple_of(groups) => Some(groups),
            None => groups.is_multiple_of(n).then_some(n),
        };
        let fits = |n: u16| experts.is_multiple_of(n) && n <= MAX_GATING_GROUPS && cells(n).is_some();
        if !fits(gating_groups) {
            let of_nodes = |Nodes { nodes, .. }| format!("{nodes} nodes");
            let places = options.nodes.map_or_else(|| format!("{groups} groups"), of_nodes);
            let among = format!("over {experts} experts and {places}");
            let valid = (1..=MAX_GATING_GROUPS).filter(|&n| fits(n)).collect();
            return Err(SolveError::NotEven { what: "gating groups", found: gating_groups, among, valid });
        }
        topology.per_cell = usize::from(groups / cells(gating_groups).unwrap_or(1));
        topology.gating_groups = usize::from(gating_groups);
        Ok(topology)
    }

    /// Whether activations on some other groups are worth more than on others.
    pub(crate) fn has_nodes(&self) -> bool {
        self.near > 0.0
    }

    /// Returns the cell of a group.
    pub(crate) fn cell(&self, group: usize) -> usize {
        group / self.per_cell
    }

    /// Returns V, the value of an activation by a unit of one group on another group.
    pub(crate) fn value(&self, of: usize, on: usize) -> f64 {
        match of == on {
            true => 1.0,
            false if self.cell(of) == self.cell(on) => self.near,
            false => 0.0,
        }
    }

    /// Whether an expert in one group may exchange groups with one in the other.
    pub(crate) fn exchangeable(&self, a: usize, b: usize) -> bool {
        self.gating_groups == 1 || self.cell(a) == self.cell(b)
    }

    /// For each group [.., G], the value of a unit's activations if the unit were placed there: each row times V.
    pub(crate) fn worth(&self, local: &[u64], groups: usize) -> Vec<f64> {
        let mut worth = Vec::with_capacity(local.len());
        for cell in local.chunks_exact(groups).flat_map(|row| row.chunks_exact(self.per_cell)) {
            let all: u64 = cell.iter().sum();
            worth.extend(cell.iter().map(|&own| own as f64 + self.near * (all - own) as f64));
        }
        worth
    }

    /// Multiplies fixed-point gains by V, in place.
    pub(crate) fn weigh(&self, gains: &mut [i64]) {
        if !self.has_nodes() {
            return;
        }
        for cell in gains.chunks_exact_mut(self.per_cell) {
            let all: i64 = cell.iter().sum();
            cell.iter_mut().for_each(|own| *own += (self.near * (all - *own) as f64).round() as i64);
        }
    }
}

/// Checks that the groups can be divided evenly among the nodes.
pub(crate) fn check_nodes(nodes: u16, groups: u16) -> Result<(), SolveError> {
    if nodes > 0 && groups.is_multiple_of(nodes) {
        return Ok(());
    }
    let valid = (1..=groups).filter(|nodes| groups.is_multiple_of(*nodes)).collect();
    Err(SolveError::NotEven { what: "nodes", found: nodes, among: format!("over {groups} groups"), valid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worth_and_weights_are_the_values_times_the_counts() {
        let topology = Topology { per_cell: 2, near: 0.75, gating_groups: 1 };
        let local = [5u64, 7, 11, 13, 0, 2];
        let worth = topology.worth(&local, 6);
        let mut gains = local.map(|count| (count as i64) << 8);
        topology.weigh(&mut gains);
        for (of, worth) in worth.iter().enumerate() {
            let by_hand: f64 = local.iter().enumerate().map(|(on, &n)| topology.value(of, on) * n as f64).sum();
            assert!((worth - by_hand).abs() < 1e-12, "{of}: {worth} {by_hand}");
            assert!((gains[of] as f64 / 256.0 - by_hand).abs() < 0.01, "{of}");
        }
    }
}
