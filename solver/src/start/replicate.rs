//! Replica placement: a second alternation, with S/G > N/G experts in every group of a layer.
//!
//! An activation is local if the unit's group holds any replica of its expert. With the holders fixed, the unit step is
//! unchanged; with the units fixed, choosing each layer's holders is a flow problem (module `replica_step`). Loads
//! assume static nearest dispatch: a group computes its own units' activations of the experts it holds, and an even
//! share of the activations from groups that do not hold the expert. Loads depend on both steps, so the expert step
//! keeps a reserve below the limit.

use crate::input::Problem;
use crate::start::alternate::{Watch, alternate, while_better};
use crate::step::{
    Clustering, Exchange, FREE, Held, Limits, MIN_GAIN, Plan, ReplicaLayer, Search, Stop, Task, Topology, Traffic,
    Transport, column_gains, excess, load_cap, profits_of_local, replicate_within, weighed_profits,
};

/// Fraction of the headroom between the mean and the expert-load limit that the expert step uses.
const OF_THE_LIMIT: f64 = 0.95;

/// Adds replicas to a clustering without any, so that every group has `slots` experts. Returns `None` if the watch
/// stops it before the first round of both steps has finished.
pub(crate) fn replicate(task: Task<'_>, slots: usize, from: &Clustering, watch: Watch<'_>) -> Option<Clustering> {
    let around = Around { task, slots, watch };
    let held = holders(task, slots, &from.plan, None, watch.stop);
    let first = around.unit_step(held, &from.plan, from.iterations)?;
    Some(around.alternate(first))
}

/// Improves a clustering with replicas by passes of exchanges that gain once the units have followed, each pass
/// followed by both steps. The result is at least as good.
pub(crate) fn improve_replicas(task: Task<'_>, slots: usize, best: Clustering, watch: Watch<'_>) -> Clustering {
    let around = Around { task, slots, watch };
    while_better(task.limits.swap_passes, best, |best| {
        let held = around.exchange_pass(best.replicas.as_ref()?, &best.plan)?;
        let next = around.unit_step(held, &best.plan, best.iterations)?;
        Some(around.alternate(next))
    })
}

/// Continues from a clustering with replicas after a kick; the result may be worse. Returns `None` if the watch stops
/// it immediately.
pub(crate) fn kick_replicas(
    task: Task<'_>,
    slots: usize,
    from: &Clustering,
    random: &mut fastrand::Rng,
    watch: Watch<'_>,
) -> Option<Clustering> {
    let around = Around { task, slots, watch };
    let first = around.unit_step(from.replicas.as_ref()?.perturbed(random), &from.plan, 0)?;
    let found = around.alternate(first);
    Some(improve_replicas(task, slots, found, watch))
}

#[derive(Clone, Copy)]
struct Around<'a> {
    task: Task<'a>,
    slots: usize,
    watch: Watch<'a>,
}

impl Around<'_> {
    fn unit_step(&self, held: Held, last: &Plan, iterations: u32) -> Option<Clustering> {
        if (self.watch.stop)() {
            return None;
        }
        let Task { problem, capacity, limits, .. } = self.task;
        let profit = replica_profits(problem, &held);
        let transport = Transport { mass: &problem.mass, profit: &profit, capacity };
        let plan = transport.solve_until(Some(&last.price), self.watch.stop)?;
        Some(clustering(problem, held, plan, limits, iterations + 1))
    }

    fn alternate(&self, best: Clustering) -> Clustering {
        alternate(self.task, self.watch, best, |best| {
            let held = holders(self.task, self.slots, &best.plan, best.replicas.as_ref(), self.watch.stop);
            if best.replicas.as_ref() == Some(&held) {
                return None;
            }
            self.unit_step(held, &best.plan, best.iterations)
        })
    }

    /// Makes one pass over all exchanges of two experts in a layer, at the plan's prices and with up-to-date loads;
    /// returns `None` if no exchange gains.
    fn exchange_pass(&self, held: &Held, plan: &Plan) -> Option<Held> {
        let Task { problem, limits: Limits { groups, max_over_mean, .. }, .. } = self.task;
        let mut held = held.clone();
        let mut search = Search::of_local(problem, &local_counts(problem, &held), &plan.price, Topology::flat(groups));
        let (gains, fraction_bits) = column_gains(problem, plan, groups);
        let least = MIN_GAIN * problem.total_activations() as f64;
        let mut exchanged = false;
        for (layer, traffic) in layer_traffic(problem, &gains, fraction_bits, groups).enumerate() {
            let first = layer * problem.experts;
            let cap = load_cap(traffic.load.iter().sum(), groups, reserved(max_over_mean));
            let mut loads = traffic.loads(held.layer(layer));
            for a in 0..problem.experts {
                if (self.watch.stop)() {
                    return exchanged.then_some(held);
                }
                for b in a + 1..problem.experts {
                    for exchange in Exchange::of_pair(held.layer(layer), a, b) {
                        let of_columns = Exchange { a: first + exchange.a, b: first + exchange.b, ..exchange };
                        if search.gain_of(&of_columns) <= least {
                            continue;
                        }
                        let after = traffic.loads_after(&loads, held.layer(layer), &exchange);
                        let most = |loads: &[u64]| loads.iter().copied().max().unwrap_or(0);
                        if most(&after) > cap.max(most(&loads)) {
                            continue;
                        }
                        search.exchange(&of_columns);
                        held.exchange(first, &exchange);
                        (loads, exchanged) = (after, true);
                        // The remaining exchanges refer to outdated holders.
                        break;
                    }
                }
            }
        }
        exchanged.then_some(held)
    }
}

/// Returns the load limit that the steps target, so that the actual limit still holds after the units have moved. The
/// reserve does not cover other units: with 8 ranks, the judging requests of README.md reach 1.103 with and without it;
/// it gains 0.03 points.
fn reserved(max_over_mean: f64) -> f64 {
    1.0 + (max_over_mean - 1.0) * OF_THE_LIMIT
}

/// Fallback for a problem that was stopped before its replicas were placed: chooses holders for its plan without a
/// search.
pub(crate) fn replicas_not_reached(task: Task<'_>, slots: usize, from: &Clustering) -> Clustering {
    let Task { problem, capacity, limits, .. } = task;
    let held = holders(task, slots, &from.plan, None, &|| true);
    let profit = replica_profits(problem, &held);
    let plan = Transport { mass: &problem.mass, profit: &profit, capacity }.greedy();
    clustering(problem, held, plan, limits, from.iterations)
}

/// Builds a clustering with replicas.
pub(crate) fn clustering(problem: &Problem, held: Held, plan: Plan, limits: Limits, iterations: u32) -> Clustering {
    let loads = replica_loads(problem, &held, &plan);
    let excess = loads.iter().map(|loads| {
        let cap = load_cap(loads.iter().sum(), limits.groups, limits.max_over_mean);
        excess(loads, cap)
    });
    let group_of = held.holders.iter().map(|holders| holders[0]).collect();
    Clustering {
        group_of,
        plan,
        load_excess: excess.sum(),
        iterations,
        replicas: Some(held),
        penalty: 0,
        sequences: FREE.clone(),
    }
}

/// Runs the expert step with replicas, layer by layer; once stopped, continues without further search.
fn holders(task: Task<'_>, slots: usize, plan: &Plan, current: Option<&Held>, stop: Stop<'_>) -> Held {
    let Task { problem, limits: Limits { groups, max_over_mean, .. }, .. } = task;
    let (gains, fraction_bits) = column_gains(problem, plan, groups);
    let layers = layer_traffic(problem, &gains, fraction_bits, groups).enumerate().flat_map(|(layer, traffic)| {
        let cap = load_cap(traffic.load.iter().sum(), groups, reserved(max_over_mean));
        replicate_within(&ReplicaLayer { traffic, slots, cap }, current.map(|current| current.layer(layer)), stop)
    });
    Held { groups, experts: problem.experts, holders: layers.collect() }
}

/// Returns the profits of the units, [U, G]: every activation of an expert counts on each group that holds it.
pub(crate) fn replica_profits(problem: &Problem, held: &Held) -> Vec<i64> {
    profits_of_local(problem, &local_counts(problem, held), held.groups)
}

/// Returns the local activations of every unit on every group, [U, G].
fn local_counts(problem: &Problem, held: &Held) -> Vec<u64> {
    let flat = held.flat();
    problem.local_where(held.groups, |column| flat.of(column))
}

/// Returns the load of each group in each layer, [L][G].
pub(crate) fn replica_loads(problem: &Problem, held: &Held, plan: &Plan) -> Vec<Vec<u64>> {
    let (gains, fraction_bits) = column_gains(problem, plan, held.groups);
    let layers = layer_traffic(problem, &gains, fraction_bits, held.groups).zip(held.layers());
    layers.map(|(traffic, holders)| traffic.loads(holders)).collect()
}

/// Iterates over the traffic of each layer, given the activations [L * N, G] of each column by the group of the unit.
fn layer_traffic<'a>(
    problem: &'a Problem,
    gains: &'a [i64],
    fraction_bits: u32,
    groups: usize,
) -> impl Iterator<Item = Traffic<'a>> {
    let loads = problem.column_load.chunks_exact(problem.experts);
    let layers = loads.zip(gains.chunks_exact(problem.experts * groups));
    layers.map(move |(load, own)| Traffic { load, own, fraction_bits, groups })
}

/// Returns the profits of the units on the groups of a clustering, including replicas.
pub(crate) fn clustering_profits(
    problem: &Problem,
    clustering: &Clustering,
    groups: usize,
    topology: Topology,
) -> Vec<i64> {
    match &clustering.replicas {
        Some(held) => replica_profits(problem, held),
        None => weighed_profits(problem, &clustering.group_of, groups, topology),
    }
}
