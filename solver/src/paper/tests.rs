//! Both functions respect their caps on any counts; the sums of the swaps are right.

use proptest::prelude::*;

use super::experts::{coactivations, expert_place};
use super::requests::request_schedule;
use super::start::cluster_units;
use super::{PaperCap, PaperOptions, local, score};
use crate::fixtures::{model, profile_of, provenance};
use crate::input::problem::Problem;

use semmoe_tables::TraceBuilder;

/// Tokens that occur `tokens[i]` times, all layers, with experts drawn from the seed.
fn problem(layers: u16, experts: u16, tokens: &[u8], seed: u64) -> Problem {
    let mut random = fastrand::Rng::with_seed(seed);
    let model = model(layers, experts, 2, tokens.len() as u32);
    let mut trace = TraceBuilder::new(model, provenance()).expect("a model");
    for (token, &count) in tokens.iter().enumerate() {
        let ids = vec![token as u32; usize::from(count)];
        let mut routes = Vec::new();
        for _ in 0..ids.len() * usize::from(layers) {
            let first = random.u16(0..experts);
            routes.extend([first, (first + random.u16(1..experts)) % experts]);
        }
        trace.push(&ids, u32::from(count), &routes, None).expect("a request");
    }
    let profile = profile_of(&trace.finish().expect("a trace"));
    Problem::from_profile(&profile, 0..usize::from(layers)).expect("a problem")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn caps_hold(
        tokens in proptest::collection::vec(1u8..30, 1..60),
        (groups, each, layers) in (1usize..6, 1u16..4, 1u16..3),
        seed in any::<u64>(),
    ) {
        let experts = (groups as u16 * each).max(2);
        prop_assume!(experts.is_multiple_of(groups as u16));
        let problem = problem(layers, experts, &tokens, seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let label = cluster_units(&problem, groups, &mut random);
        prop_assert!(label.iter().all(|&group| usize::from(group) < groups));
        let options = PaperOptions { swap_steps: 200, ..PaperOptions::default() };
        let group_of = expert_place(&problem, &coactivations(&problem), &label, groups, &options, &mut random);
        for layer in group_of.chunks_exact(problem.experts) {
            for group in 0..groups {
                let held = layer.iter().filter(|&&at| usize::from(at) == group).count();
                prop_assert_eq!(held, problem.experts / groups);
            }
        }
        let by_units = request_schedule(&problem, &group_of, groups, &options);
        for group in 0..groups {
            let held = by_units.iter().filter(|&&at| usize::from(at) == group).count();
            prop_assert!(held <= problem.units().div_ceil(groups), "line 40: {held} of {}", problem.units());
        }
        let by_tokens = PaperOptions { cap: PaperCap::Tokens, ..options };
        let by_tokens = request_schedule(&problem, &group_of, groups, &by_tokens);
        let heaviest = problem.mass.iter().max().copied().unwrap_or(0);
        for group in 0..groups {
            let held: u64 =
                (0..problem.units()).filter(|&unit| usize::from(by_tokens[unit]) == group).map(|unit| problem.mass[unit]).sum();
            prop_assert!(held < problem.total_mass().div_ceil(groups as u64) + heaviest);
        }
    }

    /// With load and units excluded from the sum, swaps only ever raise the co-activations within groups.
    #[test]
    fn swaps_never_lower_the_sum(tokens in proptest::collection::vec(1u8..30, 8..40), seed in any::<u64>()) {
        let problem = problem(1, 8, &tokens, seed);
        let together = coactivations(&problem);
        let label = vec![0; problem.units()];
        let within = |swap_steps: u32| {
            let options = PaperOptions { swap_steps, beta_e: 0.0, gamma_e: 0.0, ..PaperOptions::default() };
            let mut random = fastrand::Rng::with_seed(seed);
            let group_of = expert_place(&problem, &together, &label, 2, &options, &mut random);
            (0..64).filter(|i| group_of[i / 8] == group_of[i % 8] && i / 8 != i % 8).map(|i| together[i]).sum::<f64>()
        };
        let (before, after) = (within(0), within(300));
        prop_assert!(after >= before - 1e-9, "{before} {after}");
    }
}

#[test]
fn a_row_of_coactivations_adds_up_to_the_load() {
    let problem = problem(2, 6, &[3, 9, 1, 7], 4);
    let together = coactivations(&problem);
    for (row, &load) in together.chunks_exact(6).zip(&problem.column_load) {
        assert!((row.iter().sum::<f64>() - load as f64).abs() < 1e-9);
    }
}

#[test]
fn the_score_is_remote_activations_and_the_greatest_load() {
    let problem = problem(1, 2, &[4], 0);
    let (group_of, label) = (vec![0, 1], vec![1]);
    assert_eq!(local(&problem, &group_of, &label), 4, "each occurrence activates both experts");
    assert_eq!(score(&problem, &group_of, &label, 2), 4 + 4);
}
