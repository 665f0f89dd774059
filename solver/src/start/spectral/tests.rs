//! The spectral seed finds what is planted, and divides evenly.

use semmoe_tables::TraceBuilder;

use super::*;
use crate::fixtures::{model, profile_of, provenance};
use crate::step::clustering::Limits;
use crate::step::topology::Topology;

/// 12 experts in each of two layers; tokens of kind c use the experts e with (e + layer) % 3 = c, except for one
/// activation in ten.
fn planted(seed: u64) -> Problem {
    let mut random = fastrand::Rng::with_seed(seed);
    let ids: Vec<u32> = (0..3000).map(|_| random.u32(0..60)).collect();
    let mut routes = Vec::new();
    for &id in &ids {
        for layer in 0..2 {
            let kind = if random.u32(0..10) == 0 { random.u32(0..3) } else { id % 3 };
            let mut own: Vec<u16> = (0..12).filter(|expert| (expert + layer) % 3 == kind as u16).collect();
            random.shuffle(&mut own);
            routes.extend(&own[..2]);
        }
    }
    let mut trace = TraceBuilder::new(model(2, 12, 2, 60), provenance()).unwrap();
    trace.push(&ids, 3000, &routes, None).unwrap();
    Problem::from_profile(&profile_of(&trace.finish().unwrap()), 0..2).unwrap()
}

#[test]
fn planted_groups_are_found() {
    let problem = planted(1);
    let found = Points::new(&problem, 3).divide(&problem, &mut fastrand::Rng::with_seed(1), &|| false).unwrap().1;
    for (column, group) in found.iter().enumerate() {
        // Columns of one kind are together, whatever the layer.
        let kind = |column: usize| (column % 12 + column / 12) % 3;
        let first = (0..24).find(|&other| kind(other) == kind(column)).unwrap();
        assert_eq!(*group, found[first], "{found:?}");
    }
    let limits = Limits {
        groups: 3,
        max_over_mean: 1.1,
        iterations: 1,
        swap_passes: 0,
        slots: None,
        topology: Topology::flat(3),
        sequences: None,
    };
    let capacity = crate::step::unit_step::mass_capacity(problem.total_mass(), 3, 0.1);
    let mut random = fastrand::Rng::with_seed(2);
    let task = Task {
        problem: &problem,
        capacity: &capacity,
        limits,
        placement: None,
        sequences: &crate::step::clustering::FREE,
    };
    let plan = spectral_plan(&task, &mut random, &|| false).unwrap();
    assert!(crate::step::clustering::local_rate(plan.primal, &problem) > 0.9);
    assert!(spectral_plan(&task, &mut random, &|| true).is_none());
}

#[test]
fn experts_that_are_alike_or_silent_are_divided_evenly() {
    let mut problem = planted(3);
    for groups in [1, 2, 4, 12] {
        let (_, group_of) =
            Points::new(&problem, groups).divide(&problem, &mut fastrand::Rng::with_seed(5), &|| false).unwrap();
        for layer in group_of.chunks_exact(12) {
            assert!((0..groups as u16).all(|group| layer.iter().filter(|&&g| g == group).count() == 12 / groups));
        }
    }
    assert!(has_spectral(&problem));
    problem.column_load[0] = 0;
    assert!(coactivation(&problem).iter().all(|value| value.is_finite()));
}
