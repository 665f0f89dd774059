//! `semmoe evaluate`.

use semmoe_profiler::html::GroupLoads;
use semmoe_solver::{EvalInput, EvalOptions, SolveError, evaluate};
use semmoe_tables::{FormatError, Profile, Tables, Trace};

use super::outcome::{Document, JudgedOn, Outcome};
use super::tables::Slots;
use super::{check_output, figures, pages, print_result, profile};
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
    let all = if args.verbose { figures::lines(&evaluation)? + "\n" } else { String::new() };
    print_result(args.output, "evaluate", &document, || {
        format!("{all}{} tokens evaluated\n\n{outcome}\n\n{verdict}", evaluation.tokens)
    })
}

/// Returns the commands to suggest next: export good tables to an engine; otherwise solve or evaluate again.
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
    let mut options = EvalOptions {
        concurrency: args.in_flight as usize,
        output_tokens: args.output_tokens.into(),
        nodes: args.nodes,
        step_tokens,
        ..EvalOptions::default()
    };
    options.prefix.blocks_per_rank = args.prefix_blocks;
    options
}

/// Names both files if their models differ: the error calls the tables "here" and the traffic "there".
fn failure(args: &EvaluateArgs, error: SolveError) -> CliError {
    match (&error, args.trace.as_ref().or(args.profile.as_ref())) {
        (SolveError::Format(FormatError::ModelMismatch { .. }), Some(traffic)) => {
            CliError::input(format!("{} and {} are for {error}", args.tables.display(), traffic.display()))
        }
        _ => CliError::input(error),
    }
}
