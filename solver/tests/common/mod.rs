//! Small models and traces for the tests.

mod traces;

use std::ops::ControlFlow;

use proptest::test_runner::{Config as ProptestConfig, RngSeed};
use semmoe_solver::{SolveError, SolveOptions, SolveProgress, Solved, solve};
use semmoe_tables::{Attention, Trace, TraceBuilder, UNKNOWN_EXPERT};
pub(crate) use traces::{model, profile_of, provenance, recorded};

/// Requests of `topics` kinds, equally many. Each kind owns an equal part of the experts of each layer, shuffled, and
/// an equal part of the vocabulary; `purity` is the probability that an activation stays with its kind. Every 20th
/// token's route is unknown.
pub(crate) fn planted(topics: usize, requests: usize, purity: f64, seed: u64) -> Trace {
    let (layers, experts, top_k, vocabulary) = (3usize, 16usize, 2usize, 160u32);
    let mut random = fastrand::Rng::with_seed(seed);
    let owners: Vec<Vec<u16>> = (0..layers)
        .map(|layer| {
            let mut order: Vec<u16> = (0..experts as u16).collect();
            fastrand::Rng::with_seed(layer as u64).shuffle(&mut order);
            order
        })
        .collect();
    let model = model(layers as u16, experts as u16, top_k as u16, vocabulary);
    let mut builder = TraceBuilder::new(model, provenance()).unwrap();
    let each = experts / topics;
    let mut kinds: Vec<usize> = (0..requests).map(|request| request % topics).collect();
    random.shuffle(&mut kinds);
    for topic in kinds {
        let tokens = random.usize(4..40);
        let words = vocabulary / topics as u32;
        let ids: Vec<u32> = (0..tokens).map(|_| topic as u32 * words + random.u32(0..words - 2)).collect();
        let mut routes = Vec::new();
        for position in 0..tokens {
            for order in &owners {
                if position % 20 == 19 {
                    routes.extend(std::iter::repeat_n(UNKNOWN_EXPERT, top_k));
                    continue;
                }
                let kind = if random.f64() < purity { topic } else { random.usize(0..topics) };
                let mut own = order[kind * each..(kind + 1) * each].to_vec();
                random.shuffle(&mut own);
                routes.extend(&own[..top_k]);
            }
        }
        builder.push(&ids, tokens as u32, &routes, None).unwrap();
    }
    builder.finish().unwrap()
}

/// Fixed cases: local search obeys no law that holds for every instance, so a new random case must not fail an
/// unchanged build.
pub(crate) fn fixed_cases(cases: u32) -> ProptestConfig {
    ProptestConfig { rng_seed: RngSeed::Fixed(1), ..ProptestConfig::with_cases(cases) }
}

/// Options of a quick solve without bounds, which affect no other figure.
pub(crate) fn options(groups: u16, attention: Attention) -> SolveOptions {
    SolveOptions { starts: 6, bounds: None, ..SolveOptions::new(groups, attention, provenance()) }
}

pub(crate) fn quiet(_: SolveProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Solves from a trace and the profile made of it.
pub(crate) fn solve_trace(trace: &Trace, options: &SolveOptions) -> Result<Solved, SolveError> {
    solve(&profile_of(trace), Some(trace), options, &mut quiet)
}
