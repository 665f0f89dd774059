//! Current placements: the cheapest labels by brute force, and steps that never lose once moves have a cost.

use proptest::prelude::*;
use semmoe_tables::TraceBuilder;

use super::*;
use crate::fixtures::{model, profile_of, provenance};
use crate::start::alternate::{Watch, bring_home, run_from_current, run_start, stay};
use crate::step::clustering::{Limits, Task};
use crate::step::topology::Topology;
use crate::step::transport::Transport;
use crate::step::unit_step::mass_capacity;

const LAYERS: usize = 2;
const EXPERTS: usize = 8;

fn problem(seed: u64) -> Problem {
    let mut trace = TraceBuilder::new(model(LAYERS as u16, EXPERTS as u16, 2, 40), provenance()).unwrap();
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..300 {
        let token = random.u32(0..40);
        let route = (0..LAYERS).flat_map(|_| {
            let first = (token as u16 + random.u16(0..3)) % EXPERTS as u16;
            [first, (first + random.u16(1..EXPERTS as u16)) % EXPERTS as u16]
        });
        trace.push(&[token], 1, &route.collect::<Vec<u16>>(), None).unwrap();
    }
    Problem::from_profile(&profile_of(&trace.finish().unwrap()), 0..LAYERS).unwrap()
}

fn shuffled(groups: usize, random: &mut fastrand::Rng) -> Vec<u16> {
    let layer = |_| {
        let mut layer: Vec<u16> = (0..EXPERTS).map(|expert| (expert % groups) as u16).collect();
        random.shuffle(&mut layer);
        layer
    };
    (0..LAYERS).flat_map(layer).collect()
}

fn permutations(of: usize) -> Vec<Vec<u16>> {
    if of == 0 {
        return vec![Vec::new()];
    }
    let longer = |shorter: Vec<u16>| (0..of).map(move |at| [&shorter[..at], &[of as u16 - 1], &shorter[at..]].concat());
    permutations(of - 1).into_iter().flat_map(longer).collect()
}

fn limits(groups: usize) -> Limits {
    Limits {
        groups,
        max_over_mean: 1e4,
        iterations: 30,
        swap_passes: 4,
        slots: None,
        topology: Topology::flat(groups),
        sequences: None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn labels_move_as_few_as_brute_force(seed: u64, groups in prop::sample::select(vec![2usize, 4])) {
        let problem = problem(seed);
        let capacity = mass_capacity(problem.total_mass(), groups, 0.1);
        let mut random = fastrand::Rng::with_seed(seed);
        let placement = CurrentPlacement::new(&problem, shuffled(groups, &mut random), EXPERTS, 0.3);
        let elsewhere = CurrentPlacement::new(&problem, shuffled(groups, &mut random), EXPERTS, 0.3);
        let found = stay(Task { problem: &problem, capacity: &capacity, limits: limits(groups), placement: Some(&elsewhere), sequences: &crate::step::clustering::FREE });
        let moved = |found: &Clustering| placement.moved(&found.group_of).iter().sum::<u64>();
        let fewest = permutations(groups).iter().map(|label| moved(&found.clone().renamed(label))).min();
        let renamed = placement.relabelled(found.clone(), &limits(groups), &|| false);
        prop_assert_eq!(Some(moved(&renamed)), fewest);
        // Relabelling keeps the assignment: its value, computed by hand, is unchanged.
        let profit = crate::step::unit_step::weighed_profits(&problem, &renamed.group_of, groups, Topology::flat(groups));
        let transport = Transport { mass: &problem.mass, profit: &profit, capacity: &capacity };
        prop_assert_eq!(renamed.plan.value(&transport), found.plan.primal);
        prop_assert_eq!(transport.dual_value(&renamed.plan.price), found.plan.dual);
    }

    #[test]
    fn labels_by_cells_are_as_good_as_brute_force(
        seed: u64, (groups, per_cell) in prop::sample::select(vec![(4usize, 2usize), (4, 1), (4, 4), (6, 2), (6, 3)]),
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let stays: Vec<i64> = (0..groups * groups).map(|_| random.i64(0..20)).collect();
        let value = |label: &[u16]| -> i64 {
            label.iter().enumerate().map(|(from, &to)| stays[from * groups + usize::from(to)]).sum()
        };
        let cell = |to: u16| usize::from(to) / per_cell;
        let keeps_cells = |label: &&Vec<u16>| {
            label.chunks_exact(per_cell).all(|labels| labels.iter().all(|&to| cell(to) == cell(labels[0])))
        };
        let most = permutations(groups).iter().filter(keeps_cells).map(|label| value(label)).max();
        prop_assert_eq!(Some(value(&cell_by_cell(&stays, groups, per_cell, &|| false).unwrap())), most);
    }

    #[test]
    fn nothing_is_lost_to_moves(seed: u64, cost in 0.0f64..0.6) {
        let (problem, groups) = (problem(seed), 4);
        let capacity = mass_capacity(problem.total_mass(), groups, 0.1);
        let placement = CurrentPlacement::new(&problem, shuffled(groups, &mut fastrand::Rng::with_seed(seed)), EXPERTS, cost);
        let watch = Watch { reached: &|_| (), stop: &|| false };
        let worth = |found: &Clustering| found.plan.primal - placement.penalty(&found.group_of);
        let task = Task { problem: &problem, capacity: &capacity, limits: limits(groups), placement: Some(&placement), sequences: &crate::step::clustering::FREE };
        let stays = stay(task);
        let from_current = run_from_current(task, watch).unwrap();
        prop_assert_eq!(from_current.penalty, placement.penalty(&from_current.group_of));
        prop_assert!(worth(&from_current) >= worth(&stays));
        let cold = run_start(task, false, &mut fastrand::Rng::with_seed(seed), watch).unwrap();
        let renamed = placement.relabelled(cold.clone(), &limits(groups), &|| false);
        let brought = bring_home(task, cold, watch);
        prop_assert!(worth(&brought) >= worth(&renamed));
        for layer in brought.group_of.chunks_exact(EXPERTS) {
            prop_assert!((0..4).all(|group| layer.iter().filter(|&&g| g == group).count() == 2));
        }
        // The change of a swap equals the change of the total cost.
        let (a, b) = (0, (1..EXPERTS).find(|&b| group_at(&placement, b) != group_at(&placement, 0)).unwrap());
        let mut swapped = placement.group_of.clone();
        swapped.swap(a, b);
        let (from, to) = (group_at(&placement, a), group_at(&placement, b));
        let change = placement.change(a, from, to) + placement.change(b, to, from);
        prop_assert!((change * PROFIT_ONE - placement.penalty(&swapped) as f64).abs() <= 4.0);
    }
}

fn group_at(placement: &CurrentPlacement, column: usize) -> usize {
    usize::from(placement.group_of[column])
}
