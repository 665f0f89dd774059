//! The transportation step is exact: equal to brute force on small instances, and to its own dual on larger ones.

use proptest::prelude::*;

use super::*;
use crate::step::whole::{MAX_ROUNDS, whole};

/// Best value over all integer splits of every unit, by exhaustion.
fn brute_force(problem: &Transport<'_>, unit: usize, room: &mut [u64]) -> Option<i128> {
    let Some(&mass) = problem.mass.get(unit) else { return Some(0) };
    let mut best = None;
    let mut parts = vec![0; room.len()];
    every_split(problem, unit, 0, mass, room, &mut parts, &mut best);
    best
}

fn every_split(
    problem: &Transport<'_>,
    unit: usize,
    group: usize,
    left: u64,
    room: &mut [u64],
    parts: &mut [u64],
    best: &mut Option<i128>,
) {
    if group == room.len() {
        if left == 0 {
            let own: i128 =
                parts.iter().zip(problem.row(unit)).map(|(&part, &q)| i128::from(part) * i128::from(q)).sum();
            let total = brute_force(problem, unit + 1, room).map(|rest| rest + own);
            *best = (*best).max(total);
        }
        return;
    }
    for part in 0..=left.min(room[group]) {
        room[group] -= part;
        parts[group] = part;
        every_split(problem, unit, group + 1, left - part, room, parts, best);
        parts[group] = 0;
        room[group] += part;
    }
}

fn check(problem: &Transport<'_>, start: Option<&[i64]>) -> Plan {
    let groups = problem.capacity.len();
    let plan = problem.solve(start);
    assert_eq!(plan.primal, plan.dual, "the prices prove the plan");
    assert!(plan.price.iter().all(|&price| price >= 0));
    for split in &plan.splits {
        assert_eq!(split.parts.iter().map(|part| part.1).sum::<u64>(), problem.mass[split.unit]);
        assert!(split.parts.len() > 1);
    }
    for plan in [&plan, &whole(problem, &plan, MAX_ROUNDS)] {
        let loads = plan.loads(problem.mass, groups);
        assert_eq!(loads.iter().sum::<u64>(), problem.mass.iter().sum::<u64>());
        assert!(loads.iter().zip(problem.capacity).all(|(load, room)| load <= room), "{loads:?}");
        assert!(plan.primal <= plan.dual);
    }
    plan
}

prop_compose! {
    fn instance(max_units: usize, max_groups: usize, max_mass: u64, max_profit: i64)(
        groups in 1..=max_groups, units in 0..=max_units,
    )(
        mass in prop::collection::vec(1..=max_mass, units),
        profit in prop::collection::vec(-max_profit..=max_profit, units * groups),
        start in prop::option::of(prop::collection::vec(-max_profit..=max_profit, groups)),
        mut capacity in prop::collection::vec(0..=max_mass * 3, groups),
        extra in 0..=max_mass * 2,
    ) -> (Vec<u64>, Vec<i64>, Vec<u64>, Option<Vec<i64>>) {
        let short = (mass.iter().sum::<u64>() + extra).saturating_sub(capacity.iter().sum());
        let each = short.div_ceil(capacity.len() as u64);
        capacity.iter_mut().for_each(|room| *room += each);
        (mass, profit, capacity, start)
    }
}

proptest! {
    #[test]
    fn equals_brute_force((mass, profit, capacity, start) in instance(4, 3, 4, 6)) {
        let problem = Transport { mass: &mass, profit: &profit, capacity: &capacity };
        let plan = check(&problem, start.as_deref());
        prop_assert_eq!(Some(plan.primal), brute_force(&problem, 0, &mut capacity.clone()));
    }

    #[test]
    fn is_proved_by_its_prices((mass, profit, capacity, start) in instance(120, 9, 1000, 1 << 40)) {
        let problem = Transport { mass: &mass, profit: &profit, capacity: &capacity };
        let plan = check(&problem, start.as_deref());
        // Start prices change the path, never the value.
        prop_assert_eq!(plan.primal, problem.solve(None).primal);
        prop_assert_eq!(plan.primal, problem.solve(Some(&plan.price)).primal);
    }

    #[test]
    fn many_ties((mass, profit, capacity, start) in instance(60, 6, 3, 1)) {
        check(&Transport { mass: &mass, profit: &profit, capacity: &capacity }, start.as_deref());
    }

    #[test]
    fn equal_masses_are_never_split(units in 1usize..7, groups in 1usize..5, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mass = vec![1; units * groups];
        let profit: Vec<i64> = (0..units * groups * groups).map(|_| random.i64(-50..50)).collect();
        let capacity = vec![units as u64; groups];
        let plan = check(&Transport { mass: &mass, profit: &profit, capacity: &capacity }, None);
        prop_assert!(plan.splits.is_empty());
    }
}

#[test]
fn one_heavy_unit_is_split_and_stays_split() {
    let (mass, profit, capacity) = ([10, 1, 1], [9, 0, 5, 4, 3, 5], [6, 6]);
    let problem = Transport { mass: &mass, profit: &profit, capacity: &capacity };
    let plan = check(&problem, None);
    assert_eq!(plan.splits, [Split { unit: 0, parts: vec![(0, 6), (1, 4)] }]);
    assert_eq!(whole(&problem, &plan, MAX_ROUNDS).splits, plan.splits);
}

#[test]
fn no_units_and_one_group() {
    assert_eq!(check(&Transport { mass: &[], profit: &[], capacity: &[0, 3] }, None).primal, 0);
    assert_eq!(check(&Transport { mass: &[4], profit: &[-7], capacity: &[4] }, None).primal, -28);
}

/// Instances with their optimum by HiGHS, generated by `tests/highs/make.py`.
#[test]
fn equals_highs() {
    let instances: serde_json::Value =
        serde_json::from_str(include_str!("../../../tests/highs/instances.json")).unwrap();
    let whole = |list: &serde_json::Value| -> Vec<i64> {
        list.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
    };
    let instances = instances["transport"].as_array().unwrap();
    assert_eq!(instances.len(), 40);
    for (at, instance) in instances.iter().enumerate() {
        let masses = |name: &str| -> Vec<u64> { whole(&instance[name]).into_iter().map(i64::unsigned_abs).collect() };
        let (mass, capacity) = (masses("mass"), masses("capacity"));
        let profit: Vec<i64> = instance["profit"].as_array().unwrap().iter().flat_map(whole).collect();
        let plan = check(&Transport { mass: &mass, profit: &profit, capacity: &capacity }, None);
        assert_eq!(plan.primal, i128::from(instance["optimum"].as_i64().unwrap()), "instance {at}");
    }
}
