//! All compared methods of placing experts, on one profile.

use std::ops::ControlFlow;
use std::sync::Arc;

use semmoe_bench_placement::baselines;
use semmoe_bench_placement::counts::LayerCounts;
use semmoe_solver::{PaperCap, PaperOptions, SolveOptions, Solved, TokenStrings, solve, solve_paper};
use semmoe_tables::{Attention, Placement, Profile, Provenance};

use crate::error::BenchError;
use crate::given::Given;

/// A placement with its name.
pub(crate) struct Placed {
    pub(crate) name: String,
    pub(crate) placement: Placement,
    /// The algorithm's own tables, if it computes any.
    pub(crate) own: Option<Solved>,
}

impl Placed {
    fn solved(name: &'static str, solved: Solved) -> Self {
        Placed { name: name.to_owned(), placement: solved.tables.placement().clone(), own: Some(solved) }
    }
}

pub(crate) const VANILLA: &str = "contiguous";
pub(crate) const RANDOM: &str = "random";
pub(crate) const OURS: &str = "semmoe";
pub(crate) const PAPER: &str = "Algorithm 1";
pub(crate) const PAPER_TOKENS: &str = "Algorithm 1, cap on tokens";

/// The settings of a comparison.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) groups: u16,
    pub(crate) seed: u64,
    pub(crate) starts: u32,
    pub(crate) threads: usize,
    /// Largest activations of a group over the mean, for the solver.
    pub(crate) expert_load_limit: f64,
    /// eps of the solver: a group gets at most (1 + eps) of the mean tokens.
    pub(crate) token_margin: f64,
    /// Placements made by other programs, for [`domains`](crate::domains).
    pub(crate) given: Vec<Given>,
    /// The tokens' strings.
    pub(crate) strings: Option<Arc<TokenStrings>>,
}

pub(crate) fn provenance() -> Provenance {
    Provenance { source: "bench/placement".into(), created: "2026-01-01T00:00:00Z".into() }
}

pub(crate) fn solve_options(setting: &Setting, attention: Attention) -> SolveOptions {
    let defaults = SolveOptions::new(setting.groups, attention, provenance());
    SolveOptions {
        // Bounds are shown where layers are solved separately.
        bounds: defaults.bounds.filter(|_| attention == Attention::Tp),
        seed: setting.seed,
        starts: setting.starts,
        threads: setting.threads,
        expert_load_limit: setting.expert_load_limit,
        token_margin: setting.token_margin,
        token_strings: setting.strings.clone(),
        ..defaults
    }
}

pub(crate) fn quiet(_: semmoe_solver::SolveProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The paper's algorithm with one of its two caps.
pub(crate) fn paper_options(cap: PaperCap) -> PaperOptions {
    PaperOptions { cap, ..PaperOptions::default() }
}

/// Placements that use only a profile.
pub(crate) fn baselines(profile: &Profile, setting: &Setting) -> Result<Vec<Placed>, BenchError> {
    let groups = usize::from(setting.groups);
    let counts = LayerCounts::all(profile);
    let experts = usize::from(profile.model().num_experts);
    if groups == 0 || !experts.is_multiple_of(groups) {
        let found = format!("{experts} experts in {groups} groups");
        return Err(BenchError::Input {
            found,
            expected: "expected groups of equal size, because most baselines need them",
        });
    }
    let transitions = LayerCounts::transitions(profile);
    let mut rng = fastrand::Rng::with_seed(setting.seed);
    let mut each = |rule: &mut dyn FnMut(&LayerCounts, &mut fastrand::Rng) -> Vec<u16>| -> Vec<Vec<u16>> {
        counts.iter().map(|counts| rule(counts, &mut rng)).collect()
    };
    let layers = vec![
        (RANDOM, each(&mut |_, rng| baselines::random(experts, groups, rng))),
        ("EPLB (load only)", each(&mut |counts, _| baselines::eplb(counts, groups))),
        ("greedy co-activation", each(&mut |counts, _| baselines::coactivation(counts, groups))),
        ("greedy co-activation, by load", each(&mut |counts, _| baselines::coactivation_by_load(counts, groups))),
        ("spectral + repair", each(&mut |counts, rng| baselines::spectral(counts, groups, rng))),
        ("MoETuner", baselines::moetuner(&counts, &transitions, groups)),
        ("ExFlow", baselines::exflow(experts, &transitions, groups, &mut rng)),
    ];
    let contiguous = Placement::contiguous(counts.len(), profile.model().num_experts, setting.groups)?;
    let mut placed = vec![Placed { name: VANILLA.to_owned(), placement: contiguous, own: None }];
    for (name, layers) in layers {
        placed.push(Placed { name: name.to_owned(), placement: Placement::new(setting.groups, layers)?, own: None });
    }
    Ok(placed)
}

/// All placements for tokens routed layer by layer.
pub(crate) fn token_methods(profile: &Profile, setting: &Setting) -> Result<Vec<Placed>, BenchError> {
    let options = solve_options(setting, Attention::Tp);
    let mut placed = baselines(profile, setting)?;
    for (name, cap) in [(PAPER, PaperCap::Units), (PAPER_TOKENS, PaperCap::Tokens)] {
        placed.push(Placed::solved(name, solve_paper(profile, None, &options, &paper_options(cap), &mut quiet)?));
    }
    placed.push(Placed::solved(OURS, solve(profile, None, &options, &mut quiet)?));
    Ok(placed)
}
