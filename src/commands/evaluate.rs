//! `semmoe evaluate`.

use std::fmt::Write;

use semmoe_profiler::html::GroupLoads;
use semmoe_solver::{BURST, EvalInput, EvalOptions, Evaluation, RequestFigures, SolveError, StepFigures, evaluate};
use semmoe_tables::{FormatError, Profile, Tables, Trace};

use super::outcome::{Document, JudgedOn, Outcome};
use super::tables::Slots;
use super::{check_output, pages, print_result, profile};
use crate::args::EvaluateArgs;
use crate::error::CliError;

pub(crate) fn run(args: &EvaluateArgs) -> Result<(), CliError> {
    let tables = Tables::open(&args.tables).map_err(CliError::input)?;
    let trace = args.trace.as_deref().map(Trace::open).transpose().map_err(CliError::input)?;
    let profile = args.profile.as_deref().map(Profile::open).transpose().map_err(CliError::input)?;
    let input = match (&trace, &profile) {
        (Some(trace), _) => EvalInput::Trace(trace),
        (None, Some(profile)) => EvalInput::Profile(profile),
        (None, None) => return Err(CliError::input("evaluate needs --trace or --profile")),
    };
    if let Some(html) = &args.html {
        check_output(html, [&args.tables].into_iter().chain(&args.trace).chain(&args.profile))?;
    }
    let evaluation = evaluate(&tables, input, &options(args)).map_err(|error| failure(args, error))?;
    let groups = group_loads(&tables, input)?;
    let outcome = Outcome::of_evaluation(&evaluation, JudgedOn::File, &groups);
    let verdict = outcome.verdict(None, next(args, &tables));
    if let Some(html) = &args.html {
        let judged = pages::Judged { evaluation: &evaluation, outcome: &outcome, groups: &groups, verdict: &verdict };
        pages::evaluation(&tables, &judged).write(html).map_err(profile::failure)?;
    }
    let document = Document { out: None, outcome: Some(&outcome), verdict: &verdict, figures: &evaluation };
    print_result(args.output, "evaluate", &document, || {
        let figures = if args.verbose { describe(&evaluation) + "\n" } else { String::new() };
        format!("{figures}{} tokens judged\n\n{outcome}\n\n{verdict}", evaluation.tokens)
    })
}

/// After good tables they go to the engines; others are solved again.
fn next(args: &EvaluateArgs, solved: &Tables) -> [String; 2] {
    let tables = args.tables.display();
    let good = format!("semmoe tables export --tables {tables} --format sglang --out experts.json");
    let other = match (&args.trace, &args.profile) {
        (None, Some(_)) => format!("semmoe evaluate --tables {tables} --trace OTHER.trace.safetensors"),
        _ => {
            let shape = Slots::of(solved).solve_arguments(solved);
            format!("semmoe solve --profile MORE.profile.safetensors {shape} --out m.tables.safetensors")
        }
    };
    [good, other]
}

fn group_loads(tables: &Tables, input: EvalInput<'_>) -> Result<GroupLoads, CliError> {
    match input {
        EvalInput::Profile(profile) => Ok(GroupLoads::of_profile(profile, tables)),
        EvalInput::Trace(trace) => {
            let counted = Profile::of_trace(trace).map_err(|error| profile::failure(error.into()))?;
            Ok(GroupLoads::of_profile(&counted, tables))
        }
    }
}

fn options(args: &EvaluateArgs) -> EvalOptions {
    let step_tokens = args.step_tokens.map(|tokens| tokens as usize);
    let mut options = EvalOptions { nodes: args.nodes, step_tokens, ..EvalOptions::default() };
    options.prefix.blocks_per_rank = args.prefix_blocks;
    options
}

/// Two files that are about different models are both named: the tables are "here", the traffic "there".
fn failure(args: &EvaluateArgs, error: SolveError) -> CliError {
    match (&error, args.trace.as_ref().or(args.profile.as_ref())) {
        (SolveError::Format(FormatError::ModelMismatch { .. }), Some(traffic)) => {
            CliError::input(format!("{} and {} are about {error}", args.tables.display(), traffic.display()))
        }
        _ => CliError::input(error),
    }
}

fn step_lines(steps: &StepFigures) -> [(String, String); 3] {
    let &StepFigures { step_tokens, fullest_group, fullest_group_wanted, moved, .. } = steps;
    let &StepFigures { fullest_link, fullest_link_wanted, fullest_link_unshuffled, .. } = steps;
    let link = format!(
        "{fullest_link:.3} (without evening {fullest_link_wanted:.3}, without a shuffle {fullest_link_unshuffled:.3})"
    );
    [
        (
            format!("steps of {step_tokens}, fullest over mean"),
            format!("{fullest_group:.3} (without evening {fullest_group_wanted:.3})"),
        ),
        ("  rows over the fullest link, per token".to_owned(), link),
        ("  moved from a group that was full".to_owned(), format!("{:.1}%", 100.0 * moved)),
    ]
}

fn describe(evaluation: &Evaluation) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<36} {value}");
    };
    line("tokens judged", evaluation.tokens.to_string());
    line("local activation rate", format!("{:.4}", evaluation.lar));
    line("  with random ranks", format!("{:.4}", evaluation.lar_random));
    if let Some(lar) = evaluation.lar_t_only {
        line("  by T alone, without A", format!("{lar:.4}"));
    }
    if let Some(lar) = evaluation.lar_paper_rule {
        line("  by the surer of T and A (paper)", format!("{lar:.4}"));
    }
    let layers = evaluation.lar_per_layer.iter().map(|lar| lar.map_or("-".to_owned(), |lar| format!("{lar:.3}")));
    line("  by layer", layers.collect::<Vec<_>>().join(" "));
    if let (Some(rate), Some(inter)) = (evaluation.node_local_rate, evaluation.inter_node_activations_per_token) {
        line("activations on the own node", format!("{rate:.4}"));
        line("  on other nodes, per token and layer", format!("{inter:.3}"));
    }
    let ranks = evaluation.remote_ranks_per_token;
    line(
        "remote ranks per token",
        ranks.map_or("unknown: only a trace says it".to_owned(), |ranks| format!("{ranks:.3}")),
    );
    for (before, ranks) in
        [("random ranks", evaluation.remote_ranks_random), ("blocks of experts", evaluation.remote_ranks_blocks)]
    {
        if let Some(ranks) = ranks {
            line(&format!("  with {before}"), format!("{ranks:.3}"));
        }
    }
    line("expert load, max over mean", format!("{:.3}", evaluation.expert_load_imbalance));
    line("expert load, max over median", format!("{:.3}", evaluation.expert_load_imbalance_max_over_median));
    line("token load, max over mean", format!("{:.3}", evaluation.token_imbalance));
    for (name, value) in evaluation.steps.iter().flat_map(step_lines) {
        line(&name, value);
    }
    for (of, curve) in [("tokens", &evaluation.calibration.tokens), ("requests", &evaluation.calibration.requests)] {
        if let Some(curve) = curve {
            line(&format!("calibration error of T, {of}"), format!("{:.4}", curve.expected_calibration_error));
        }
    }
    let figures = |figures: &RequestFigures| {
        let RequestFigures { request_lar, remote_ranks_per_token, request_imbalance, burst_imbalance, .. } = figures;
        let cached = figures.cached_share.map_or_else(String::new, |cached| format!(", cached {:.1}%", 100.0 * cached));
        format!(
            "rate {request_lar:.4}, remote ranks {remote_ranks_per_token:.3}, token load max over mean \
             {request_imbalance:.3}, worst of {BURST} requests {burst_imbalance:.3}{cached}"
        )
    };
    for (policy, of_policy) in evaluation.policies.iter().flatten() {
        line(&format!("requests by {policy}"), figures(of_policy));
    }
    let references = [
        ("requests by argmax, loads ignored", &evaluation.argmax),
        ("requests in windows, exact", &evaluation.windowed),
        ("requests all at once by T", &evaluation.batch_predicted),
        ("requests, batch optimum", &evaluation.batch_optimum),
    ];
    for (name, of_reference) in references {
        if let Some(reference) = of_reference {
            line(name, figures(reference));
        }
    }
    text
}
