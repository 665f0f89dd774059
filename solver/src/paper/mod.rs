//! Algorithm 1 of the paper (appendix B), as a baseline: alternates greedy placement of experts and of units under
//! full/not-full masks. Line numbers refer to the paper's listing.
//!
//! | lines | where | open points in the paper, and our choices |
//! |---|---|---|
//! | 3-19 | `experts` | line 13 reads `alpha_r`, `beta_r`, but `alpha_e`, `beta_e` are passed: we use the latter. Neither `gamma_e` nor the unit of `loads_cls` is given: `gamma_e` is an option, and loads are relative to the mean load of a group |
//! | 11, 12 | `experts` | the affinities are only said to be "computed": we use fractions of the expert's activations, those shared with a group's experts (expected under `C_p`) and those from a group's units, so that the weights have the same meaning on all data |
//! | 20-25 | `experts` | `aff_gain` is undefined: we use the change in the sum that the greedy pass increases, in activations, including the load term. `ft_steps` is an option |
//! | 28-42 | `requests` | line 34's affinity between a request and the requests of a cluster is the cosine similarity of its activations and their sum; line 35's is its local share. `alpha_r`, `beta_r` are options |
//! | 29 | `requests` | longest first; if tokens of the vocabulary are the units, a token's length is its frequency |
//! | 40 | `requests` | the cap counts requests (K/E each) regardless of their tokens: [`PaperCap::Units`]. [`PaperCap::Tokens`] is the same pass with a cap on tokens, the quantity that the paper's objective balances |
//! | 44 | `start` | "cluster based on expert affinity": k-means of the units' activation shares with k-means++ seeds |
//! | 48 | here | "summation [of] the max load and communication cost": remote activations plus the activations of the most loaded group, per layer; both terms count activations, so no weight is needed |
//! | 49, 50 | here | "samples with scores" is undefined: we keep the pair with the lowest score, which no sampling can beat |
//! | 54, 55 | `tokens` | T and its confidence. Algorithm 2 sums rows of a [tokens x E] matrix, so with attention dp the rows of line 54's matrix are kept whole (more favourable to the paper than line 55's argmax); with attention tp T is the unit's own label and `T_p` its local share |
//!
//! If requests are the units, their recorded activations replace `sum of C_p` over their tokens; being exact, they
//! again favour the paper. With attention dp, all layers share the units' groups, so line 10's loop runs layer by
//! layer, as the layers' experts do not compete. The paper has no prices, so the prices in the tables are zero.

mod experts;
mod requests;
mod start;
mod tokens;

use std::ops::ControlFlow;

use semmoe_tables::{Attention, Profile, TablesBuilder, Trace};

use crate::input::{
    Objective, Problem, SolveError, SolveOptions, at_least_one, check_input, check_together, problems, within,
};
use crate::prior::evidence::Shrinkage;
use crate::ranks::Traced;
use crate::solve::hold_out::with_hold_out;
use crate::solve::report::{Findings, SolveReport};
use crate::solve::{Solved, placement};
use crate::start::{Best, Progress, SolveProgress, mix};
use crate::step::{Clustering, Limits, PROFIT_ONE, Plan, Topology, group_loads};
use crate::tables::{BY_PAPER, tp_parts};

/// The quantity that line 40 caps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaperCap {
    /// The number of requests or distinct tokens, as printed.
    Units,
    /// The number of tokens: a cluster is full once it has its even share of the tokens.
    Tokens,
}

/// Parameters that Algorithm 1 takes as given.
#[derive(Clone, Copy, Debug)]
pub struct PaperOptions {
    /// `n_steps`: rounds of placing experts and then units.
    pub steps: u32,
    /// `ft_steps`: random swaps tried in each layer and round.
    pub swap_steps: u32,
    /// Weight of an expert's affinity with the experts of a cluster.
    pub alpha_e: f64,
    /// Weight of an expert's affinity with the units of a cluster.
    pub beta_e: f64,
    /// Weight of a cluster's load relative to the mean.
    pub gamma_e: f64,
    /// Weight of a unit's affinity with the units of a cluster.
    pub alpha_r: f64,
    /// Weight of a unit's affinity with the experts of a cluster.
    pub beta_r: f64,
    /// The quantity capped by line 40.
    pub cap: PaperCap,
}

impl Default for PaperOptions {
    fn default() -> Self {
        PaperOptions {
            steps: 30,
            swap_steps: 4000,
            alpha_e: 0.5,
            beta_e: 0.5,
            gamma_e: 0.1,
            alpha_r: 0.5,
            beta_r: 0.5,
            cap: PaperCap::Units,
        }
    }
}

impl PaperOptions {
    fn validate(&self) -> Result<(), SolveError> {
        at_least_one("steps", self.steps as usize)?;
        let weights = [
            ("alpha_e", self.alpha_e),
            ("beta_e", self.beta_e),
            ("gamma_e", self.gamma_e),
            ("alpha_r", self.alpha_r),
            ("beta_r", self.beta_r),
        ];
        weights.into_iter().try_for_each(|(name, weight)| within(name, weight, 0.0, 1e6, "a number from 0 to 1e6"))
    }
}

/// Runs Algorithm 1 instead of [`solve`](crate::solve), on the same inputs and with the same kind of result.
///
/// Uses the groups, attention, seed, provenance and hold-out fraction in `options`, and the options that only describe
/// the result (the report checks the limits on tokens and expert load, but the algorithm ignores them). With attention
/// tp and a trace, the tables contain the paper's A. Single-threaded. `progress` is called after every round; when it
/// breaks, the best result so far is returned.
///
/// # Errors
/// Those of [`solve`](crate::solve).
pub fn solve_paper(
    profile: &Profile,
    trace: Option<&Trace>,
    options: &SolveOptions,
    paper: &PaperOptions,
    progress: &mut dyn FnMut(SolveProgress) -> ControlFlow<()>,
) -> Result<Solved, SolveError> {
    options.validate()?;
    check_together(options, true)?;
    if options.objective != Objective::Activations {
        let (found, expected) =
            (options.objective.to_string(), "activations, the only objective that the paper's algorithm supports");
        return Err(SolveError::BadOption { option: "objective", found, expected });
    }
    paper.validate()?;
    check_input(profile, trace, options.groups)?;
    with_hold_out(profile, trace, options, |profile, trace, _| {
        let (unit, problems) = problems(profile, trace, options.attention)?;
        let best = run(&problems, options, paper, progress);
        let placement = placement(options.groups, &problems, &best.clusterings)?;
        let price = vec![0.0; usize::from(options.groups)];
        let (model, provenance) = (profile.model().clone(), options.provenance.clone());
        let builder = match options.attention {
            Attention::Dp => {
                let label = &best.clusterings[0].plan.label;
                let shares = tokens::token_matrix(profile, trace, label, usize::from(options.groups));
                TablesBuilder::dp(model, provenance, placement, shares, price)
            }
            Attention::Tp => {
                let mut parts = tp_parts(profile, &placement, &Shrinkage { options, prior: None });
                let labels = best.clusterings.iter().map(|clustering| &clustering.plan.label[..]);
                tokens::set_labels(&mut parts, profile, &placement, labels);
                trace.iter().for_each(|trace| tokens::set_transitions(&mut parts, trace, &placement));
                TablesBuilder::tp(model, provenance, placement, parts, price)
            }
        };
        let (version, seed) = (env!("CARGO_PKG_VERSION"), options.seed);
        let name = format!("semmoe-solver {version} {BY_PAPER} unit={unit} seed={seed} {paper:?}");
        let tables = builder.solver(name).finish()?;
        let traced = trace.map(|trace| Traced::new(trace, unit, profile));
        let findings = Findings {
            unit,
            topology: Topology::flat(usize::from(options.groups)),
            problems: &problems,
            profile,
            prior: None,
            best: &best,
            tables: &tables,
            traced: traced.as_ref(),
        };
        let report = SolveReport::new(options, findings);
        Ok(Solved { tables, report })
    })
}

/// Runs lines 44 to 51 for every problem.
fn run(problems: &[Problem], options: &SolveOptions, paper: &PaperOptions, progress: Progress<'_>) -> Best {
    let groups = usize::from(options.groups);
    let rounds = problems.len() * paper.steps as usize;
    let mut best = Best { starts: 1, ..Best::default() };
    for (index, problem) in problems.iter().enumerate() {
        let mut random = fastrand::Rng::with_seed(mix(options.seed, index as u64, 0));
        let affinity = experts::coactivations(problem);
        let mut label = start::cluster_units(problem, groups, &mut random);
        let mut kept: Option<(u64, Vec<u16>, Vec<u16>)> = None;
        for _ in 0..paper.steps {
            let group_of = experts::expert_place(problem, &affinity, &label, groups, paper, &mut random);
            label = requests::request_schedule(problem, &group_of, groups, paper);
            let score = score(problem, &group_of, &label, groups);
            if kept.as_ref().is_none_or(|kept| score < kept.0) {
                kept = Some((score, group_of, label.clone()));
            }
            best.iterations += 1;
            let step = SolveProgress { starts_done: best.iterations as usize, starts: rounds, best_lar: None };
            if best.stopped || progress(step).is_break() {
                best.stopped = true;
                break;
            }
        }
        let (_, group_of, label) = kept.unwrap_or_default();
        best.clusterings.push(clustering(problem, options, group_of, label));
    }
    best
}

/// Line 48: returns the remote activations plus those of the most loaded group of each layer. Lower is better.
fn score(problem: &Problem, group_of: &[u16], label: &[u16], groups: usize) -> u64 {
    let layers = group_of.chunks_exact(problem.experts).zip(problem.column_load.chunks_exact(problem.experts));
    let fullest = layers.map(|(group_of, load)| group_loads(group_of, load, groups).into_iter().max().unwrap_or(0));
    problem.total_activations() - local(problem, group_of, label) + fullest.sum::<u64>()
}

/// Local activations.
fn local(problem: &Problem, group_of: &[u16], label: &[u16]) -> u64 {
    let of_unit = |unit: usize| -> u64 {
        problem.row(unit).filter(|(column, _)| group_of[*column] == label[unit]).map(|entry| u64::from(entry.1)).sum()
    };
    (0..problem.units()).map(of_unit).sum()
}

/// Converts the result to the exact solver's form, with zero prices, whose dual value bounds any assignment.
fn clustering(problem: &Problem, options: &SolveOptions, group_of: Vec<u16>, label: Vec<u16>) -> Clustering {
    let limits = Limits::new(options, Topology::flat(usize::from(options.groups)), None);
    let primal = (local(problem, &group_of, &label) as f64 * PROFIT_ONE) as i128;
    let plan = Plan { label, price: vec![0; limits.groups], primal, ..Plan::default() };
    Clustering::whole(problem, group_of, plan, limits, 0)
}

#[cfg(test)]
mod tests;
