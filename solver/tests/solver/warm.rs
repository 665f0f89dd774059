//! Warm-started solves: moves are counted, must pay off, and are not made needlessly.

use crate::common;
use std::sync::Arc;

use crate::common::{options, planted, profile_of, provenance, solve_trace};
use proptest::prelude::*;
use semmoe_solver::{GivenPlacement, Objective, SolveOptions, WarmStart};
use semmoe_tables::{Attention, Placement, Tables, Trace, TraceBuilder, UNKNOWN_EXPERT};

/// A trace with a share of its requests moved to other experts: some of each layer have traded places.
fn drifted(trace: &Trace, share: f64, seed: u64) -> Trace {
    let mut random = fastrand::Rng::with_seed(seed);
    let renamed: Vec<Vec<u16>> = (0..3)
        .map(|_| {
            let mut names: Vec<u16> = (0..16).collect();
            (0..4).for_each(|_| names.swap(random.usize(0..16), random.usize(0..16)));
            names
        })
        .collect();
    let mut builder = TraceBuilder::new(trace.model().clone(), provenance()).unwrap();
    for request in trace.iter() {
        let drifts = random.f64() < share;
        let mut routes = Vec::new();
        for position in 0..request.token_ids().len() {
            for (layer, renamed) in (0..).zip(&renamed) {
                match request.route(position, semmoe_tables::LayerIdx::new(layer)) {
                    Some(route) => {
                        routes.extend(route.experts().map(|e| if drifts { renamed[e.index()] } else { e.get() }))
                    }
                    None => routes.extend([UNKNOWN_EXPERT; 2]),
                }
            }
        }
        builder.push(request.token_ids(), request.token_ids().len() as u32, &routes, None).unwrap();
    }
    builder.finish().unwrap()
}

fn roomy(attention: Attention) -> SolveOptions {
    SolveOptions { expert_load_limit: 4.0, starts: 4, ..options(4, attention) }
}

fn warm(base: &SolveOptions, tables: &Arc<Tables>, migration_cost: f64) -> SolveOptions {
    SolveOptions { warm_start: Some(WarmStart { tables: Arc::clone(tables), migration_cost }), ..base.clone() }
}

#[test]
fn dearer_moves_are_fewer() {
    for (seed, attention) in [(1, Attention::Dp), (2, Attention::Dp), (3, Attention::Tp), (4, Attention::Tp)] {
        let before = planted(4, 160, 0.75, seed);
        let after = drifted(&before, 0.6, seed);
        let tables = Arc::new(solve_trace(&before, &roomy(attention)).unwrap().tables);
        let stay = GivenPlacement::Experts(Arc::new(tables.placement().clone()));
        let stay = solve_trace(&after, &SolveOptions { placement: Some(stay), ..roomy(attention) }).unwrap();
        let mut moved = Vec::new();
        for cost in [0.0, 0.02, 0.1, 0.3, 1.0, 1e9] {
            let solved = solve_trace(&after, &warm(&roomy(attention), &tables, cost)).unwrap();
            let migration = solved.report.migration.clone().unwrap();
            assert_eq!(migration.experts_moved, migration.experts_moved_per_layer.iter().sum::<u64>());
            assert!((migration.lar_before - stay.report.lar).abs() < 1e-12, "{migration:?} {:?}", stay.report);
            let differ = |layer: usize| {
                let (old, new) = (tables.placement(), solved.tables.placement());
                let layer = semmoe_tables::LayerIdx::new(layer as u16);
                old.layer(layer).iter().zip(new.layer(layer)).filter(|(a, b)| a != b).count() as u64
            };
            assert_eq!(migration.experts_moved_per_layer, (0..3).map(differ).collect::<Vec<_>>());
            // The gain is worth the moves, in rates: an average expert has 1/16 of a layer's.
            let paid = cost * migration.experts_moved as f64 / 48.0;
            assert!(solved.report.lar - migration.lar_before >= paid - 5e-3, "{:?}", solved.report);
            moved.push(migration.experts_moved);
        }
        assert!(moved.is_sorted_by(|a, b| a >= b) && moved[0] > 0 && moved[5] == 0, "{moved:?}");
    }
}

proptest! {
    #![proptest_config(common::fixed_cases(8))]

    #[test]
    fn free_moves_are_never_worse_than_a_cold_solve(seed: u64, dp: bool, share in 0.0f64..1.0) {
        let attention = if dp { Attention::Dp } else { Attention::Tp };
        let before = planted(4, 80, 0.7, seed);
        let after = drifted(&before, share, seed);
        let tables = Arc::new(solve_trace(&before, &roomy(attention)).unwrap().tables);
        let cold = solve_trace(&after, &roomy(attention)).unwrap().report;
        let solved = solve_trace(&after, &warm(&roomy(attention), &tables, 0.0)).unwrap();
        // The bound for these groups of experts is what the unit step reached, before units are made whole.
        prop_assert!(solved.report.lar_bound >= cold.lar_bound - 1e-6, "{} {}", solved.report.lar_bound, cold.lar_bound);
        prop_assert!(solved.report.token_imbalance <= 1.02 + 160.0 / solved.report.tokens as f64);
        let again = solve_trace(&after, &SolveOptions { threads: 3, ..warm(&roomy(attention), &tables, 0.0) }).unwrap();
        prop_assert_eq!(again.tables.digest(), solved.tables.digest());
    }
}

/// Without drift nothing moves, whatever the labels of the cold starts.
#[test]
fn the_same_traffic_moves_nothing() {
    let trace = planted(4, 160, 0.9, 5);
    for attention in [Attention::Dp, Attention::Tp] {
        let base = SolveOptions { seed: 7, ..roomy(attention) };
        let tables = Arc::new(solve_trace(&trace, &roomy(attention)).unwrap().tables);
        let solved = solve_trace(&trace, &warm(&base, &tables, WarmStart::DEFAULT_COST)).unwrap();
        assert_eq!(solved.report.migration.unwrap().experts_moved, 0);
        assert_eq!(solved.tables.placement_digest(), tables.placement_digest());
        assert!(solved.tables.solver().contains(" migration_cost=0.05"), "{}", solved.tables.solver());
    }
}

#[test]
fn a_solve_that_is_ended_at_once_moves_nothing() {
    let trace = planted(4, 60, 0.9, 6);
    let tables = Arc::new(solve_trace(&trace, &roomy(Attention::Dp)).unwrap().tables);
    let options = warm(&roomy(Attention::Dp), &tables, 0.0);
    let mut stop = |_| std::ops::ControlFlow::Break(());
    let solved = semmoe_solver::solve(&profile_of(&trace), Some(&trace), &options, &mut stop).unwrap();
    assert_eq!(solved.report.migration.unwrap().experts_moved, 0);
}

#[test]
fn what_does_not_fit_is_reported() {
    let trace = planted(4, 20, 0.8, 7);
    let tables = |options: &SolveOptions| Arc::new(solve_trace(&trace, options).unwrap().tables);
    let refused = |options: SolveOptions, part: &str| {
        let error = solve_trace(&trace, &options).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    };
    let base = options(4, Attention::Dp);
    let fits = warm(&base, &tables(&base), 0.1);
    refused(warm(&base, &tables(&options(2, Attention::Dp)), 0.1), "the warm start has 2 groups, expected 4");
    let replicated = tables(&SolveOptions { redundant: 4, ..base.clone() });
    refused(warm(&base, &replicated, 0.1), "a warm start cannot be combined with tables with replicas");
    for cost in [-0.1, f64::NAN, f64::INFINITY] {
        refused(warm(&base, &tables(&base), cost), "`migration_cost` is");
    }
    refused(SolveOptions { redundant: 4, ..fits.clone() }, "a warm start cannot be combined with redundant slots");
    refused(SolveOptions { objective: Objective::Ranks, ..fits.clone() }, "the objective ranks");
    let contiguous = GivenPlacement::Experts(Arc::new(Placement::contiguous(3, 16, 4).unwrap()));
    refused(
        SolveOptions { placement: Some(contiguous), ..fits.clone() },
        "a given placement cannot be combined with a warm start",
    );
    let other = planted(4, 20, 0.8, 8);
    let mut renamed = other.model().clone();
    renamed.model = "another".into();
    let mut builder = TraceBuilder::new(renamed, provenance()).unwrap();
    builder.push(&[1], 1, &[0, 1, 0, 1, 0, 1], None).unwrap();
    let error = solve_trace(&builder.finish().unwrap(), &fits).unwrap_err().to_string();
    assert!(error.contains("different models"), "{error}");
}
