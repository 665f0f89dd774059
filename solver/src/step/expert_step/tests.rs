//! The expert step is exact and within its load limit; alternating both steps never loses.

use proptest::prelude::*;
use semmoe_tables::{Profile, TraceBuilder};

use super::*;
use crate::fixtures::{model, profile_of, provenance};
use crate::start::alternate::{Watch, not_reached, run_start};
use crate::step::clustering::{Clustering, Limits, Task, local_rate};
use crate::step::load_limit::group_loads;
use crate::step::swaps::passed;
use crate::step::topology::Topology;
use crate::step::unit_step::{mass_capacity, unit_step, weighed_profits};

/// A profile of `tokens` occurrences with random routes that depend on the token.
fn profile(layers: usize, experts: u16, top_k: u16, tokens: usize, seed: u64) -> Profile {
    let mut random = fastrand::Rng::with_seed(seed);
    let ids: Vec<u32> = (0..tokens).map(|_| (random.f64().powi(2) * 64.0) as u32).collect();
    let mut routes = Vec::new();
    for &id in &ids {
        for layer in 0..layers {
            let mut order: Vec<u16> = (0..experts).collect();
            let mut own = fastrand::Rng::with_seed(seed ^ u64::from(id) << 8 ^ layer as u64);
            own.shuffle(&mut order);
            if random.f64() < 0.3 {
                random.shuffle(&mut order);
            }
            routes.extend(&order[..usize::from(top_k)]);
        }
    }
    let mut trace = TraceBuilder::new(model(layers as u16, experts, top_k, 64), provenance()).unwrap();
    trace.push(&ids, tokens as u32, &routes, None).unwrap();
    profile_of(&trace.finish().unwrap())
}

fn limits(groups: usize, max_over_mean: f64) -> Limits {
    Limits {
        groups,
        max_over_mean,
        iterations: 30,
        swap_passes: 4,
        slots: None,
        topology: Topology::flat(groups),
        sequences: None,
    }
}

/// The best gain of one layer over all balanced assignments within the load cap, by exhaustion.
fn brute_force(gain: &[i64], load: &[u64], groups: usize, cap: u64) -> Option<i64> {
    fn place(at: usize, group_of: &mut Vec<u16>, gain: &[i64], load: &[u64], groups: usize, cap: u64) -> Option<i64> {
        if at == load.len() {
            let within = group_loads(group_of, load, groups).iter().all(|load| *load <= cap);
            let value = group_of.iter().enumerate().map(|(e, &g)| gain[e * groups + usize::from(g)]).sum();
            return within.then_some(value);
        }
        let mut best = None;
        for group in 0..groups as u16 {
            if group_of.iter().filter(|&&g| g == group).count() < load.len() / groups {
                group_of.push(group);
                best = best.max(place(at + 1, group_of, gain, load, groups, cap));
                group_of.pop();
            }
        }
        best
    }
    place(0, &mut Vec::new(), gain, load, groups, cap)
}

fn value(gain: &[i64], group_of: &[u16], groups: usize) -> i64 {
    group_of.iter().enumerate().map(|(expert, &group)| gain[expert * groups + usize::from(group)]).sum()
}

proptest! {
    #[test]
    fn one_layer_equals_brute_force(
        (groups, each) in prop::sample::select(vec![(1usize, 4usize), (2, 2), (2, 4), (3, 2), (4, 2), (3, 1)]),
        seed: u64, slack in 1.0f64..1.6,
    ) {
        let experts = groups * each;
        let mut random = fastrand::Rng::with_seed(seed);
        let load: Vec<u64> = (0..experts).map(|_| random.u64(0..100)).collect();
        let gain: Vec<i64> = (0..experts * groups).map(|_| random.i64(0..100) << 4).collect();
        let cap = load_cap(load.iter().sum(), groups, slack);
        let topology = Topology::flat(groups);
        let layer = |cap| Layer { gain: &gain, load: &load, groups, topology, fraction_bits: 4, cap };
        let free = assign_within(&layer(u64::MAX), None, &|| false).unwrap();
        prop_assert_eq!(Some(value(&gain, &free, groups)), brute_force(&gain, &load, groups, u64::MAX));

        let limited = assign_within(&layer(cap), None, &|| false).unwrap();
        for group in 0..groups as u16 {
            prop_assert_eq!(limited.iter().filter(|&&g| g == group).count(), each);
        }
        if group_loads(&limited, &load, groups).iter().all(|load| *load <= cap) {
            let best = brute_force(&gain, &load, groups, cap);
            prop_assert!(Some(value(&gain, &limited, groups)) <= best);
        }
        // The current placement is never replaced by a worse one.
        let again = assign_within(&layer(cap), Some(&limited), &|| false);
        prop_assert_eq!(again.as_ref(), Some(&limited));
    }

    #[test]
    fn neither_step_loses(
        seed: u64, groups in prop::sample::select(vec![2usize, 4, 8]), margin in 0.0f64..0.2,
        near in prop::sample::select(vec![0.0, 0.75]), gating_groups in prop::sample::select(vec![1usize, 8]),
    ) {
        let topology = Topology { per_cell: groups / 2, near, gating_groups };
        let limits = Limits { topology, ..limits(groups, 1e4) };
        let problem = Problem::from_profile(&profile(3, 16, 2, 400, seed), 0..3).unwrap();
        let capacity = mass_capacity(problem.total_mass(), groups, margin);
        let mut group_of: Vec<u16> = (0..48).map(|column| (column % 16 / (16 / groups)) as u16).collect();
        let task = Task { problem: &problem, capacity: &capacity, limits, placement: None, sequences: &crate::step::clustering::FREE };
        let mut plan = unit_step(&task, &group_of, None, &|| false).unwrap();
        for _ in 0..6 {
            prop_assert_eq!(plan.primal, plan.dual);
            group_of = expert_step(&problem, &plan, &limits, None, Some(&group_of), &|| false).unwrap();
            let next = unit_step(&task, &group_of, Some(&plan.price), &|| false).unwrap();
            // Fixed point: half a unit in the last place per count.
            prop_assert!(local_rate(plan.primal - next.primal, &problem) < 1e-7);
            plan = next;
        }
    }

    #[test]
    fn a_start_meets_its_constraints(seed: u64, groups in prop::sample::select(vec![2usize, 4])) {
        let problem = Problem::from_profile(&profile(2, 16, 4, 600, seed), 0..2).unwrap();
        let capacity = mass_capacity(problem.total_mass(), groups, 0.02);
        let limits = limits(groups, 1.1);
        let watch = Watch { reached: &|_| (), stop: &|| false };
        let task = Task { problem: &problem, capacity: &capacity, limits, placement: None, sequences: &crate::step::clustering::FREE };
        let found = run_start(task, false, &mut fastrand::Rng::with_seed(seed), watch).unwrap();
        let Clustering { group_of, plan, load_excess, .. } = found;
        for (group_of, load) in group_of.chunks_exact(16).zip(problem.column_load.chunks_exact(16)) {
            let cap = load_cap(load.iter().sum(), groups, 1.1);
            let loads = group_loads(group_of, load, groups);
            prop_assert!(load_excess > 0 || loads.iter().all(|load| *load <= cap), "{:?} over {}", loads, cap);
            for group in 0..groups as u16 {
                prop_assert_eq!(group_of.iter().filter(|&&g| g == group).count(), 16 / groups);
            }
        }
        prop_assert!(plan.loads(&problem.mass, groups).iter().zip(&capacity).all(|(load, room)| load <= room));
    }

    #[test]
    fn swaps_gain_what_they_say_at_fixed_prices(seed: u64, by_estimate: bool) {
        let problem = Problem::from_profile(&profile(2, 12, 2, 300, seed), 0..2).unwrap();
        let capacity = mass_capacity(problem.total_mass(), 3, 0.02);
        let group_of: Vec<u16> = (0..24).map(|column| (column % 3) as u16).collect();
        let task = Task { problem: &problem, capacity: &capacity, limits: limits(3, 1e4), placement: None, sequences: &crate::step::clustering::FREE };
        let plan = unit_step(&task, &group_of, None, &|| false).unwrap();
        let profit = weighed_profits(&problem, &group_of, 3, Topology::flat(3));
        let swapped = passed(&task, &group_of, &plan.price, by_estimate, &|| false);
        let Some(swapped) = swapped else { return Ok(()) };
        let dual = |group_of: &[u16], profit: &[i64]| {
            let transport = crate::step::transport::Transport { mass: &problem.mass, profit, capacity: &capacity };
            prop_assert!(group_of.chunks_exact(12).all(|layer| layer.iter().filter(|&&g| g == 0).count() == 4));
            Ok(transport.dual_value(&plan.price))
        };
        let after = weighed_profits(&problem, &swapped, 3, Topology::flat(3));
        prop_assert!(dual(&swapped, &after)? > dual(&group_of, &profit)?);
    }
}

proptest! {
    /// The gains of a unit of any group from experts in any group, weighted by V, equal those sums, and swaps keep
    /// gating groups together.
    #[test]
    fn swaps_know_nodes_and_gating_groups(seed: u64, by_estimate: bool, near in prop::sample::select(vec![0.0, 0.75])) {
        let problem = Problem::from_profile(&profile(2, 16, 2, 300, seed), 0..2).unwrap();
        let capacity = mass_capacity(problem.total_mass(), 4, 0.02);
        for gating_groups in [1, 4] {
            let limits = Limits { topology: Topology { per_cell: 2, near, gating_groups }, ..limits(4, 1e4) };
            let group_of: Vec<u16> = (0..32).map(|column| (column % 16 / 4) as u16).collect();
            let task = Task { problem: &problem, capacity: &capacity, limits, placement: None, sequences: &crate::step::clustering::FREE };
            let plan = unit_step(&task, &group_of, None, &|| false).unwrap();
            let swapped = passed(&task, &group_of, &plan.price, by_estimate, &|| false);
            let Some(swapped) = swapped else { continue };
            let dual = |group_of: &[u16]| {
                let profit = crate::step::unit_step::weighed_profits(&problem, group_of, 4, limits.topology);
                crate::step::transport::Transport { mass: &problem.mass, profit: &profit, capacity: &capacity }.dual_value(&plan.price)
            };
            prop_assert!(dual(&swapped) > dual(&group_of));
            for gating in swapped.chunks_exact(4).filter(|_| gating_groups > 1) {
                prop_assert!(gating.iter().all(|&group| group / 2 == gating[0] / 2), "{:?}", gating);
            }
        }
    }

    /// A stop at any moment yields nothing, or a result that meets the constraints.
    #[test]
    fn a_stopped_start_is_whole(seed: u64, looks in 0usize..40) {
        let problem = Problem::from_profile(&profile(2, 16, 4, 600, seed), 0..2).unwrap();
        let capacity = mass_capacity(problem.total_mass(), 4, 0.02);
        let limits = limits(4, 1.1);
        let asked = std::cell::Cell::new(0);
        let stop = || {
            asked.set(asked.get() + 1);
            asked.get() > looks
        };
        let watch = Watch { reached: &|_| (), stop: &stop };
        let task = Task { problem: &problem, capacity: &capacity, limits, placement: None, sequences: &crate::step::clustering::FREE };
        let found = run_start(task, false, &mut fastrand::Rng::with_seed(seed), watch);
        prop_assert!(asked.get() <= looks + 3, "asked {} times, to go on {looks} times", asked.get());
        let found = found.unwrap_or_else(|| not_reached(task));
        for layer in found.group_of.chunks_exact(16) {
            prop_assert!((0..4).all(|group| layer.iter().filter(|&&g| g == group).count() == 4));
        }
        prop_assert!(found.plan.primal <= found.plan.dual);
        prop_assert!(found.plan.loads(&problem.mass, 4).iter().zip(&capacity).all(|(load, room)| load <= room));
        prop_assert_eq!(found.plan.loads(&problem.mass, 4).iter().sum::<u64>(), problem.total_mass());
    }
}

proptest! {
    /// The floor is the minimum of the maximum load if one expert outweighs the others, and never above it.
    #[test]
    fn no_placement_is_below_the_floor(groups in prop::sample::select(vec![2usize, 3, 4]), seed: u64, hottest in 1u64..3000) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut load: Vec<u64> = (0..groups * 2).map(|_| random.u64(0..100)).collect();
        load[seed as usize % (groups * 2)] = hottest;
        let nothing = vec![0; load.len() * groups];
        let floor = load_floor(&load, groups);
        prop_assert_eq!(brute_force(&nothing, &load, groups, floor.saturating_sub(1)), None);
        if hottest > 200 {
            prop_assert!(brute_force(&nothing, &load, groups, floor).is_some());
            let (cap, topology) = (layer_cap(&load, groups, 1.0), Topology::flat(groups));
            let layer = Layer { gain: &nothing, load: &load, groups, topology, fraction_bits: 0, cap };
            let group_of = assign_within(&layer, None, &|| false).unwrap();
            prop_assert_eq!(group_loads(&group_of, &load, groups).into_iter().max(), Some(floor));
        }
    }
}

#[test]
fn an_impossible_limit_is_approached() {
    // One expert alone exceeds the cap.
    let layer = Layer {
        gain: &[5, 0, 5, 0, 5, 0, 5, 0],
        load: &[90, 1, 2, 3],
        groups: 2,
        topology: Topology::flat(2),
        fraction_bits: 0,
        cap: 53,
    };
    let group_of = assign_within(&layer, None, &|| false).unwrap();
    assert_eq!(group_loads(&group_of, layer.load, 2).into_iter().max(), Some(91));
}
