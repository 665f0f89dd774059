//! `semmoe profile record|build|merge|show`.

use semmoe_engines::Engine;
use semmoe_engines::http::BaseUrl;
use semmoe_profiler::{BadRecord, BuildReport, ProfilerError, RecordOptions, RecordReport};
use semmoe_tables::Phase;

use super::{print, print_json};
use crate::args::{BuildArgs, MergeArgs, PhaseArg, ProfileCommand, RecordArgs, RecordEngine, ShowArgs};
use crate::error::CliError;
use crate::progress::{Progress, say};
use crate::signals::{block_on, stop_requested};
use crate::stamp::created;

/// How many left-out records are listed; the rest are counted.
const LISTED_RECORDS: usize = 10;

pub(crate) fn run(command: ProfileCommand) -> Result<(), CliError> {
    match command {
        ProfileCommand::Record(args) => record(args),
        ProfileCommand::Build(BuildArgs { traces, out, split }) => {
            let report = semmoe_profiler::build(&traces, &out, phase(split), &created()).map_err(failure)?;
            print(&describe_build(&report))
        }
        ProfileCommand::Merge(MergeArgs { profiles, out }) => {
            let report = semmoe_profiler::merge(&profiles, &out, &created()).map_err(failure)?;
            print(&describe_build(&report))
        }
        ProfileCommand::Show(ShowArgs { file }) => {
            let summary = semmoe_profiler::show(&file).map_err(failure)?;
            print(summary.to_string().trim_end())
        }
    }
}

fn record(args: RecordArgs) -> Result<(), CliError> {
    let engine = match args.engine {
        RecordEngine::Semmoe => Engine::Semmoe,
        RecordEngine::Sglang => Engine::Sglang,
        RecordEngine::Vllm => Engine::Vllm,
    };
    let url: BaseUrl = args.url.parse().map_err(CliError::input)?;
    let options = RecordOptions {
        model: args.model_config.as_deref().map(semmoe_profiler::model_config).transpose().map_err(failure)?,
        tokenizer: args.tokenizer,
        max_tokens: args.max_tokens,
        max_prompt_tokens: args.max_prompt_tokens,
        concurrency: usize::from(args.concurrency),
        max_bad: args.max_bad,
        ..RecordOptions::new(engine, url, args.prompts, args.out, created())
    };
    let progress = Progress::start("recording", 0);
    let report =
        block_on(async { semmoe_profiler::record(options, &progress, stop_requested()).await.map_err(failure) })?;
    progress.finish(&describe_record(&report));
    list_bad(&report.bad);
    if args.json { print_json(&report) } else { print(&format!("{}: digest {}", report.out.display(), report.digest)) }
}

/// One line on what was recorded.
pub(crate) fn describe_record(report: &RecordReport) -> String {
    format!(
        "{} requests, {} tokens, {:.0} tokens/s, {} left out",
        report.requests,
        report.tokens,
        report.tokens as f64 / report.seconds.max(1e-9),
        report.bad.len()
    )
}

/// Says which records were left out, and why.
pub(crate) fn list_bad(bad: &[BadRecord]) {
    for record in bad.iter().take(LISTED_RECORDS) {
        say(&format!("left out: line {}: {}", record.line, record.reason));
    }
    if bad.len() > LISTED_RECORDS {
        say(&format!("left out: {} more", bad.len() - LISTED_RECORDS));
    }
}

fn describe_build(report: &BuildReport) -> String {
    format!("{}: {} tokens from {} files, digest {}", report.out.display(), report.tokens, report.inputs, report.digest)
}

fn phase(split: PhaseArg) -> Phase {
    match split {
        PhaseArg::Prefill => Phase::Prefill,
        PhaseArg::Decode => Phase::Decode,
        PhaseArg::All => Phase::All,
    }
}

/// Wrong input is the user's to mend; the rest is what the engine or the machine did.
pub(crate) fn failure(error: ProfilerError) -> CliError {
    match error {
        ProfilerError::Cancelled => CliError::Interrupted,
        error if error.is_input() => CliError::Input(error.to_string()),
        error => CliError::Failed(error.to_string()),
    }
}
