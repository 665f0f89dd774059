//! Balanced expert assignment that keeps each gating group within one cell, a run of consecutive expert groups.
//!
//! A router with group-limited gating first chooses among n gating groups of N/n consecutive experts. If each gating
//! group is in one cell (a node), the router's limit also limits network traffic. Within a cell, assigning the
//! experts of given gating groups is the same transportation problem. The split of gating groups over K cells is also
//! optimal, by dynamic programming over the values of all sets of n/K gating groups in every cell:
//!
//! ```text
//! best(c, S) = max over Q in S, |Q| = n/K of  best(c - 1, S \ Q) + value(c, Q)
//! ```

use crate::step::topology::Topology;
use crate::step::transport::{Plan, Stop, assign_evenly};

/// Maximum gating groups, because all sets of them are enumerated; published models have 8.
pub(crate) const MAX_GATING_GROUPS: u16 = 12;

/// Returns the best group of each expert for `profit` [N, G], with N/G experts per group and every gating group in one
/// cell. The caller guarantees that the number of cells divides the number of gating groups, which divides N.
///
/// With `dealt`, gating groups stay in the cells of that placement, which is many times faster. Returns `None` if
/// stopped.
pub(crate) fn assign_gated(
    profit: &[i64],
    groups: usize,
    topology: &Topology,
    dealt: Option<&[u16]>,
    stop: Stop<'_>,
) -> Option<Vec<u16>> {
    let dealing = Dealing::new(profit, groups, topology, stop);
    let mut group_of = vec![0; dealing.experts];
    let sets = dealt.map_or_else(|| dealing.best(), |dealt| Some(dealing.sets_of(dealt)))?;
    for (cell, set) in sets.into_iter().enumerate() {
        for (expert, group) in dealing.experts_of(set).zip(dealing.solve(cell, set, None)?.label) {
            group_of[expert] = (cell * topology.per_cell) as u16 + group;
        }
    }
    Some(group_of)
}

struct Dealing<'a> {
    profit: &'a [i64],
    groups: usize,
    experts: usize,
    per_cell: usize,
    gating_groups: usize,
    /// All sets of gating groups that fill a cell, as bit masks.
    sets: Vec<u32>,
    stop: Stop<'a>,
}

impl<'a> Dealing<'a> {
    fn new(profit: &'a [i64], groups: usize, topology: &Topology, stop: Stop<'a>) -> Self {
        let Topology { per_cell, gating_groups, .. } = *topology;
        let each = gating_groups * per_cell / groups;
        let sets = (0..1u32 << gating_groups).filter(|set| set.count_ones() as usize == each).collect();
        Dealing { profit, groups, experts: profit.len() / groups, per_cell, gating_groups, sets, stop }
    }

    fn experts_of(&self, set: u32) -> impl Iterator<Item = usize> {
        let each = self.experts / self.gating_groups;
        (0..self.experts).filter(move |expert| set & (1 << (expert / each)) != 0)
    }

    /// Returns each cell's set in a placement that keeps gating groups together.
    fn sets_of(&self, placement: &[u16]) -> Vec<u32> {
        let mut sets = vec![0; self.groups / self.per_cell];
        let gating = placement.chunks_exact(self.experts / self.gating_groups).enumerate();
        gating.for_each(|(at, groups)| sets[usize::from(groups[0]) / self.per_cell] |= 1 << at);
        sets
    }

    /// Returns each cell's set so that the total value is maximal; ties go to the lowest sets in the last cells.
    fn best(&self) -> Option<Vec<u32>> {
        let cells = self.groups / self.per_cell;
        let mut reached: Vec<Vec<Option<(i128, u32)>>> = Vec::with_capacity(cells);
        for cell in 0..cells {
            let value = self.values(cell)?;
            let mut next: Vec<Option<(i128, u32)>> = vec![None; 1 << self.gating_groups];
            for taken in 0..1u32 << self.gating_groups {
                let so_far = match reached.last() {
                    None => (taken == 0).then_some(0),
                    Some(before) => before[taken as usize].map(|(value, _)| value),
                };
                let Some(so_far) = so_far else { continue };
                for (&set, value) in self.sets.iter().zip(&value).filter(|(set, _)| **set & taken == 0) {
                    let entry = &mut next[(taken | set) as usize];
                    if entry.is_none_or(|(known, _)| so_far + value > known) {
                        *entry = Some((so_far + value, set));
                    }
                }
            }
            reached.push(next);
        }
        let mut taken = (1u32 << self.gating_groups) - 1;
        let mut chosen = Vec::with_capacity(cells);
        for reached in reached.iter().rev() {
            // The cells' sets add up to all gating groups, so a predecessor exists.
            let set = reached[taken as usize].map_or(0, |(_, set)| set);
            chosen.push(set);
            taken &= !set;
        }
        chosen.reverse();
        Some(chosen)
    }

    /// Returns the value of every set in a cell.
    fn values(&self, cell: usize) -> Option<Vec<i128>> {
        let mut price: Option<Vec<i64>> = None;
        let value = |&set: &u32| {
            // Consecutive sets have most experts in common, so the last prices are nearly optimal.
            let plan = self.solve(cell, set, price.as_deref())?;
            price = Some(plan.price);
            Some(plan.primal)
        };
        self.sets.iter().map(value).collect()
    }

    /// Returns the best assignment of a set's experts to the groups of a cell, numbered within the cell. Any start
    /// prices are valid.
    fn solve(&self, cell: usize, set: u32, start: Option<&[i64]>) -> Option<Plan> {
        let first = cell * self.per_cell;
        let own = |expert: usize| {
            let row = expert * self.groups + first;
            self.profit[row..row + self.per_cell].iter().copied()
        };
        let profit: Vec<i64> = self.experts_of(set).flat_map(own).collect();
        assign_evenly(&profit, self.per_cell, start, self.stop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The best value over all assignments, by exhaustion.
    fn brute_force(profit: &[i64], groups: usize, topology: &Topology, placed: &mut Vec<u16>) -> Option<i64> {
        let experts = profit.len() / groups;
        let at = placed.len();
        if at == experts {
            return Some(placed.iter().enumerate().map(|(e, &g)| profit[e * groups + usize::from(g)]).sum());
        }
        let each = experts / topology.gating_groups;
        let mut best = None;
        for group in 0..groups as u16 {
            let full = placed.iter().filter(|&&g| g == group).count() == experts / groups;
            let cell = |group: u16| topology.cell(group.into());
            let torn = !at.is_multiple_of(each) && cell(placed[at - 1]) != cell(group);
            if !full && !torn {
                placed.push(group);
                best = best.max(brute_force(profit, groups, topology, placed));
                placed.pop();
            }
        }
        best
    }

    proptest! {
        #[test]
        fn equals_brute_force(
            seed: u64,
            (experts, groups, cells, gating_groups) in prop::sample::select(vec![
                (8usize, 4usize, 2usize, 4usize), (8, 2, 2, 4), (8, 4, 4, 4), (8, 4, 2, 2), (6, 3, 3, 6), (9, 3, 3, 3), (8, 4, 2, 8), (6, 1, 1, 3),
            ]),
        ) {
            let mut random = fastrand::Rng::with_seed(seed);
            let profit: Vec<i64> = (0..experts * groups).map(|_| random.i64(-50..100)).collect();
            let topology = Topology { per_cell: groups / cells, near: 0.0, gating_groups };
            let group_of = assign_gated(&profit, groups, &topology, None, &|| false).unwrap();
            let again = assign_gated(&profit, groups, &topology, Some(&group_of), &|| false);
            prop_assert_eq!(again.as_ref(), Some(&group_of));
            for group in 0..groups as u16 {
                prop_assert_eq!(group_of.iter().filter(|&&g| g == group).count(), experts / groups);
            }
            for gating in group_of.chunks_exact(experts / gating_groups) {
                prop_assert!(gating.iter().all(|&g| topology.cell(g.into()) == topology.cell(gating[0].into())));
            }
            let value: i64 = group_of.iter().enumerate().map(|(e, &g)| profit[e * groups + usize::from(g)]).sum();
            prop_assert_eq!(Some(value), brute_force(&profit, groups, &topology, &mut Vec::new()));
        }
    }
}
