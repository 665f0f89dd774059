//! `semmoe evaluate`.

use semmoe_solver::{EvalInput, EvalOptions, evaluate};
use semmoe_tables::{Profile, Tables, Trace};

use super::{print, print_json};
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
    let evaluation = evaluate(&tables, input, &EvalOptions::default()).map_err(CliError::input)?;
    if args.json { print_json(&evaluation) } else { print(evaluation.to_string().trim_end()) }
}
