//! Given placements: T, prices and report for experts that stay in place.

use crate::common;
use std::sync::Arc;

use crate::common::{model, options, planted, profile_of, provenance, quiet, solve_trace};
use proptest::prelude::*;
use semmoe_solver::{
    BoundOptions, GivenPlacement, Objective, PaperOptions, SolveError, SolveOptions, TokenAssigner, solve, solve_paper,
};
use semmoe_tables::export::{read_sglang, sglang};
use semmoe_tables::{Attention, LayerIdx, Placement, Replicas, TokenId};

fn given(placement: GivenPlacement, groups: u16, attention: Attention) -> SolveOptions {
    SolveOptions { placement: Some(placement), ..options(groups, attention) }
}

#[test]
fn linear_and_round_robin_are_what_they_are_called() {
    let trace = planted(4, 60, 0.8, 1);
    for attention in [Attention::Dp, Attention::Tp] {
        let linear = solve_trace(&trace, &given(GivenPlacement::Linear, 4, attention)).unwrap();
        let contiguous = Placement::contiguous(3, 16, 4).unwrap();
        assert_eq!(linear.tables.placement(), &contiguous);
        assert_eq!(linear.tables.placement_digest(), contiguous.digest());
        assert!(linear.report.placement_given && linear.report.starts == 0, "{:?}", linear.report);
        assert!(linear.tables.solver().contains(" placement=linear"), "{}", linear.tables.solver());
        let robin = solve_trace(&trace, &given(GivenPlacement::RoundRobin, 4, attention)).unwrap();
        assert_eq!(robin.tables.placement().layer(LayerIdx::new(2))[..6], [0, 1, 2, 3, 0, 1]);
        assert_eq!(robin.tables.placement_digest(), robin.tables.placement().digest());
    }
}

proptest! {
    #![proptest_config(common::fixed_cases(12))]

    /// Feeding a solved placement back gives the same placement, and the same value from the unit step alone.
    #[test]
    fn a_solved_placement_given_back_has_the_value_it_had(
        seed: u64, dp: bool, redundant in prop::sample::select(vec![0u16, 4]), threads in 1usize..4,
    ) {
        let trace = planted(4, 80, 0.7, seed);
        let attention = if dp { Attention::Dp } else { Attention::Tp };
        let redundant = if dp { redundant } else { 0 };
        let base = SolveOptions { redundant, starts: 2, ..options(4, attention) };
        let solved = solve_trace(&trace, &base).unwrap();
        let placement = match solved.tables.physical_to_logical() {
            Some(slots) => GivenPlacement::Slots(Arc::new(slots.clone())),
            None => GivenPlacement::Experts(Arc::new(solved.tables.placement().clone())),
        };
        let bounds = Some(BoundOptions::default());
        let again = solve_trace(&trace, &SolveOptions { threads, bounds, ..given(placement, 4, attention) }).unwrap();
        prop_assert_eq!(again.tables.placement_digest(), solved.tables.placement_digest());
        prop_assert!((again.report.lar - solved.report.lar).abs() < 5e-3, "{} {}", again.report.lar, solved.report.lar);
        prop_assert!((again.report.lar_bound - solved.report.lar_bound).abs() < 1e-6);
        prop_assert_eq!(again.report.redundant, redundant);
        prop_assert!((again.report.expert_load_imbalance - solved.report.expert_load_imbalance).abs() < 0.05);
        prop_assert!(again.report.token_imbalance <= 1.02 + 40.0 * 4.0 / again.report.tokens as f64);
        if redundant == 0 {
            let bound = again.report.bound_sdp.unwrap().min(again.report.bound_spectral.unwrap());
            prop_assert!(again.report.lar <= bound + 1e-9 && again.report.gap.unwrap() >= -1e-9);
        }
        // T depends only on the placement, not on how it was found.
        if dp {
            for token in (0..160).map(TokenId::new) {
                prop_assert_eq!(again.tables.token_row(token), solved.tables.token_row(token));
            }
        }
    }
}

/// [`TokenAssigner`] makes the same step on shares: on evidence alone both have the same value.
#[test]
fn tokens_alone_agree_with_the_token_assigner() {
    let trace = planted(4, 120, 0.7, 3);
    let profile = profile_of(&trace);
    let options = SolveOptions { prior_occurrences: 1e-6, ..given(GivenPlacement::RoundRobin, 4, Attention::Tp) };
    let solved = solve(&profile, None, &options, &mut quiet).unwrap();
    let placement = solved.tables.placement();
    let plan = TokenAssigner::new(&profile, &options).unwrap().assign(placement).unwrap();
    let (mut local, mut all) = (0.0, 0.0);
    for layer in (0..3).map(LayerIdx::new) {
        for token in (0..160).map(TokenId::new) {
            let row = profile.row(layer, token);
            let of_group = |group: u16| -> f64 {
                let held = row
                    .experts
                    .iter()
                    .zip(row.counts)
                    .filter(|(e, _)| placement.layer(layer)[usize::from(**e)] == group);
                held.map(|(_, &count)| f64::from(count)).sum()
            };
            let shares = plan.shares(layer, token);
            local += shares.iter().map(|&(group, share)| share * of_group(group.get())).sum::<f64>();
            all += row.activations() as f64;
        }
    }
    assert!((solved.report.lar_bound - local / all).abs() < 1e-4, "{} {}", solved.report.lar_bound, local / all);
}

/// All traffic goes to one kind of experts, on one group: accepted, and reported.
#[test]
fn a_load_above_the_limit_is_reported() {
    let trace = planted(4, 60, 0.9, 4);
    let mut builder = semmoe_tables::TraceBuilder::new(model(3, 16, 2, 160), provenance()).unwrap();
    for request in trace.iter() {
        let routes: Vec<u16> =
            (0..request.token_ids().len() * 3).flat_map(|at| [at as u16 % 4, (at as u16 + 1) % 4]).collect();
        builder.push(request.token_ids(), request.token_ids().len() as u32, &routes, None).unwrap();
    }
    let solved = solve_trace(&builder.finish().unwrap(), &given(GivenPlacement::Linear, 4, Attention::Dp)).unwrap();
    assert!(!solved.report.expert_load_limit_met, "{:?}", solved.report);
    assert!((solved.report.expert_load_imbalance - 4.0).abs() < 1e-9, "{:?}", solved.report);
}

#[test]
fn an_exported_placement_comes_back() {
    let trace = planted(4, 60, 0.8, 5);
    for redundant in [0, 8] {
        let options = SolveOptions { redundant, ..options(4, Attention::Dp) };
        let solved = solve_trace(&trace, &options).unwrap();
        let read = read_sglang(&sglang(&solved.tables).unwrap(), trace.model(), 4).unwrap();
        assert_eq!(read.to_placement().is_some(), redundant == 0);
        let digest = read.to_placement().map_or_else(|| read.digest(), |placement| placement.digest());
        assert_eq!(digest, solved.tables.placement_digest());
    }
}

#[test]
fn what_does_not_fit_is_reported() {
    let trace = planted(4, 20, 0.8, 7);
    let refused = |options: &SolveOptions, part: &str| {
        let error = solve_trace(&trace, options).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    };
    refused(&given(GivenPlacement::Linear, 3, Attention::Dp), "3 groups do not divide 16 experts");
    refused(&given(GivenPlacement::RoundRobin, 3, Attention::Tp), "[1, 2, 4, 8, 16]");
    let of_others = GivenPlacement::Experts(Arc::new(Placement::contiguous(3, 16, 2).unwrap()));
    refused(&given(of_others, 4, Attention::Dp), "has 2 groups, 3 layers of 16 experts, expected 4 groups");
    let linear = given(GivenPlacement::Linear, 4, Attention::Dp);
    refused(
        &SolveOptions { redundant: 4, ..linear.clone() },
        "a given placement cannot be combined with redundant slots",
    );
    refused(&SolveOptions { objective: Objective::Ranks, ..linear.clone() }, "the objective ranks");
    let row: Vec<i32> = (0..4).flat_map(|group: i32| (0..5).map(move |at| (group * 4 + at) % 16)).collect();
    let mut sorted = row.clone();
    sorted.chunks_exact_mut(5).for_each(<[i32]>::sort_unstable);
    let replicated = Replicas::new(trace.model(), 4, 20, sorted.repeat(3)).unwrap();
    refused(
        &given(GivenPlacement::Slots(Arc::new(replicated)), 4, Attention::Tp),
        "cannot be combined with attention tp",
    );
    let paper = solve_paper(&profile_of(&trace), None, &linear, &PaperOptions::default(), &mut quiet);
    assert!(matches!(paper.unwrap_err(), SolveError::Together { .. }));
}
