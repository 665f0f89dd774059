//! The objective `ranks`: send each token to as few ranks as possible.
//!
//! Consider kernels that send a token once to every rank with one of its experts. For an occurrence with expert set K
//! in a unit of group c, they send `distinct groups over K, minus one if c is among them`. With the experts fixed, only
//! the second term depends on the units, and it is a sum over a unit's occurrences. The unit step therefore stays the
//! exact transportation step, where the profit of a group is the number of occurrences that touch it. With the units
//! fixed, the value of a placement is not a sum over experts, so the expert step is a local search by swaps (`search`).
//! The two steps alternate, starting from the best result for activations. Neither step lowers the value, so the result
//! is never worse than the start (split units count by share).

mod routes;
mod search;
#[cfg(test)]
mod tests;
mod traced;

pub(crate) use traced::Traced;

use semmoe_tables::in_parallel;

use crate::input::Problem;
use crate::step::{Clustering, Limits, PROFIT_ONE, Plan, Transport, layer_cap, profits_of_local};
use routes::LayerRoutes;
use search::{Search, weights};

/// The alternation ends after a round that gains less than this fraction of all occurrences.
const MIN_GAIN: f64 = 1e-7;

/// A problem, with the sets of experts that its tokens activate together.
struct RankProblem<'a> {
    problem: &'a Problem,
    /// [L]
    routes: &'a [LayerRoutes],
    capacity: &'a [u64],
    limits: Limits,
}

impl RankProblem<'_> {
    /// Improves `seed` to a clustering with at most as many remote ranks, whose plan counts touched occurrences. Polls
    /// `go_on` between rounds.
    fn improve(&self, seed: Clustering, threads: usize, go_on: &mut dyn FnMut() -> bool) -> Clustering {
        let plan = self.unit_step(&seed.group_of, None);
        let mut best = Clustering { plan, ..seed };
        let mut value = self.value(&best);
        let least =
            (MIN_GAIN * self.routes.iter().map(LayerRoutes::occurrences).sum::<u64>() as f64 * PROFIT_ONE) as i128;
        for _ in 0..self.limits.iterations {
            if !go_on() {
                break;
            }
            let group_of = self.expert_step(&best, threads);
            if group_of == best.group_of {
                break;
            }
            let plan = self.unit_step(&group_of, Some(&best.plan.price));
            let next = Clustering::whole(self.problem, group_of, plan, self.limits, best.iterations + 1);
            let reached = self.value(&next);
            if reached <= value || next.load_excess > best.load_excess {
                break;
            }
            let gain = reached - value;
            (best, value) = (next, reached);
            if gain < least {
                break;
            }
        }
        best
    }

    /// Computes the exact assignment of the units for these groups of experts.
    fn unit_step(&self, group_of: &[u16], price: Option<&[i64]>) -> Plan {
        let profit = self.profits(group_of);
        Transport { mass: &self.problem.mass, profit: &profit, capacity: self.capacity }.solve(price)
    }

    /// Returns the occurrences per token that touch each group, [U, G], in fixed point.
    fn profits(&self, group_of: &[u16]) -> Vec<i64> {
        let groups = self.limits.groups;
        let mut touched = vec![0u64; self.problem.units() * groups];
        for (routes, group_of) in self.routes.iter().zip(group_of.chunks_exact(self.problem.experts)) {
            routes.add_touched(group_of, groups, &mut touched);
        }
        profits_of_local(self.problem, &touched, groups)
    }

    /// Returns the negated number of remote ranks over all occurrences, in fixed point.
    fn value(&self, clustering: &Clustering) -> i128 {
        let layers = self.routes.iter().zip(clustering.group_of.chunks_exact(self.problem.experts));
        let distinct: u64 = layers.map(|(routes, group_of)| routes.distinct(group_of, self.limits.groups)).sum();
        clustering.plan.primal - i128::from(distinct) * PROFIT_ONE as i128
    }

    /// Improves every layer's placement by local search.
    fn expert_step(&self, from: &Clustering, threads: usize) -> Vec<u16> {
        let Limits { groups, max_over_mean, .. } = self.limits;
        let layers: Vec<usize> = (0..self.problem.layers).collect();
        let search = |layer: usize| {
            let (routes, load) = (&self.routes[layer], self.problem.load(layer));
            let weight = weights(routes, &self.problem.mass, &from.plan, groups);
            let cap = layer_cap(load, groups, max_over_mean);
            Search::new(routes, weight, groups, &from.group_of[self.problem.columns(layer)]).run(load, cap)
        };
        in_parallel(&layers, threads, search).concat()
    }
}
