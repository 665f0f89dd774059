//! `semmoe profile build` and `merge`.

use std::path::PathBuf;

use semmoe_profiler::{BuildOptions, BuildReport, DomainInput, HoldOut, MergeOptions};

use super::profile::{failure, list_bad};
use super::{check_apart, check_output, print_result};
use crate::args::{BuildArgs, MergeArgs, OutputArgs, WeightArg};
use crate::error::CliError;
use crate::progress::{Progress, say};

pub(crate) fn build(args: BuildArgs) -> Result<(), CliError> {
    check_output(&args.out, paths(&args.traces))?;
    for trace in args.hold_out_trace.iter().chain(&args.solve_trace) {
        check_output(trace, paths(&args.traces))?;
        check_apart(trace, &args.out)?;
    }
    if let (Some(judge), Some(solve)) = (&args.hold_out_trace, &args.solve_trace) {
        check_apart(judge, solve)?;
    }
    let hold_out = args.hold_out.zip(args.hold_out_trace).map(|(share, out)| HoldOut { share, out });
    let options = BuildOptions {
        phase: args.split,
        threads: threads(args.threads),
        counter_bytes: u64::from(args.memory) << 20,
        weight_by_domain: args.weight_by == Some(WeightArg::Domain),
        hold_out,
        solve_trace: args.solve_trace,
        max_bad: args.max_bad,
        ..BuildOptions::new(args.traces, args.out)
    };
    let progress = Progress::start("counting", 0);
    let report = semmoe_profiler::build(&options, &progress).map_err(failure)?;
    let held_out = if options.hold_out.is_some() { format!(", {} held out", report.held_out) } else { String::new() };
    let (requests, left_out) = (report.requests, report.bad.len());
    progress.finish(&format!("{requests} requests{held_out}, {left_out} left out, {} passes", report.passes));
    list_bad(&report.bad);
    show("profile build", &report, args.output)
}

pub(crate) fn merge(args: MergeArgs) -> Result<(), CliError> {
    check_output(&args.out, paths(&args.profiles))?;
    let options = MergeOptions {
        threads: threads(args.threads),
        weight_by_domain: args.weight_by == Some(WeightArg::Domain),
        ..MergeOptions::new(args.profiles, args.out)
    };
    show("profile merge", &semmoe_profiler::merge(&options).map_err(failure)?, args.output)
}

fn paths(inputs: &[DomainInput]) -> impl Iterator<Item = &PathBuf> {
    inputs.iter().map(|input| &input.path)
}

fn threads(given: Option<u16>) -> usize {
    given.map_or_else(super::solve::threads, usize::from)
}

fn show(command: &str, report: &BuildReport, output: OutputArgs) -> Result<(), CliError> {
    for domain in &report.domains {
        say(&format!("domain {}: {} tokens, counts multiplied by {}", domain.domain, domain.tokens, domain.multiplier));
    }
    if report.tokens == 0 {
        say("nothing was counted: no token of the chosen phase has a known route");
    }
    let (out, files) = (report.out.display(), report.inputs);
    let text = || format!("{out}: {} tokens from {files} files, digest {}", report.tokens, report.digest);
    print_result(output, command, report, text)
}
