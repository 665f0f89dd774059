//! `semmoe profile`, and `record`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use semmoe_engines::http::BaseUrl;
use semmoe_profiler::{BadRecord, ProfilerError, RecordOptions, RecordReport, SelfCheck};

use super::{check_apart, check_inputs, check_output, print, print_json, server_url};
use crate::args::{Cli, Command, ProfileCommand, RecordArgs};
use crate::error::CliError;
use crate::progress::{Progress, say};
use crate::signals::{block_on, stop_requested};
use crate::stamp::created;

/// Number of skipped records to list; the rest are only counted.
const LISTED_RECORDS: usize = 10;

pub(crate) fn run(command: ProfileCommand) -> Result<(), CliError> {
    match command {
        ProfileCommand::Record(args) => record(args),
        ProfileCommand::Import(args) => super::import::run(args),
        ProfileCommand::Build(args) => super::build::build(args),
        ProfileCommand::Merge(args) => super::build::merge(args),
        ProfileCommand::Show(args) => super::show::run(&args),
    }
}

fn record(args: RecordArgs) -> Result<(), CliError> {
    let url = server_url(&args.url)?;
    let read = || [&args.prompts].into_iter().chain(&args.api_key_file);
    check_inputs(read().chain(&args.tokenizer).chain(&args.model_config))?;
    check_output(&args.out, read())?;
    let solving = args.tables.clone().zip(args.groups);
    if let Some((tables, _)) = &solving {
        check_output(tables, read())?;
        check_apart(tables, &args.out)?;
    }
    let (out, tokenizer, json) = (args.out.clone(), args.tokenizer.clone(), args.json);
    let options = record_options(args, url)?;
    let progress = Progress::start("recording", 0);
    let report =
        block_on(async { semmoe_profiler::record(options, &progress, stop_requested()).await.map_err(failure) })?;
    progress.finish(&describe_record(&report));
    if !report.dense_layers.is_empty() {
        say(&format!("layers without experts, left out: {:?}", report.dense_layers));
    }
    say_self_check(report.self_check);
    list_bad(&report.bad);
    if json {
        return print_json("profile record", &report);
    }
    print(&format!("{}: digest {}", report.out.display(), report.digest))?;
    match solving {
        Some((tables, groups)) => solve_recorded(&out, &tables, groups, tokenizer.as_deref()),
        None => Ok(()),
    }
}

/// Warns if a prompt's routing depended on concurrent requests.
fn say_self_check(check: Option<SelfCheck>) {
    if let Some(check) = check.filter(SelfCheck::is_suspicious) {
        say(&format!(
            "warning: {} of the {} activations of one prompt differ ({:.1}%) when it is sent with other requests: with bf16 this may be rounding",
            check.differing,
            check.activations,
            100.0 * check.share()
        ));
    }
}

fn record_options(args: RecordArgs, url: BaseUrl) -> Result<RecordOptions, CliError> {
    Ok(RecordOptions {
        model: args.model_config.as_deref().map(semmoe_profiler::model_config).transpose().map_err(failure)?,
        api_key_file: args.api_key_file,
        tokenizer: args.tokenizer,
        format: args.format,
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        max_prompt_tokens: args.max_prompt_tokens,
        max_prompts: args.max_prompts,
        concurrency: usize::from(args.concurrency),
        rate: args.rate,
        retries: args.retries,
        request_timeout: Duration::from_secs(args.timeout.into()),
        openai_routes: args.openai_routes,
        max_bad: args.max_bad,
        fresh: args.fresh,
        ..RecordOptions::new(args.engine, url, args.prompts, args.out, created())
    })
}

/// Runs `profile build` and `solve` with their default options.
fn solve_recorded(trace: &Path, tables: &Path, groups: u16, tokenizer: Option<&Path>) -> Result<(), CliError> {
    let name = trace.to_string_lossy();
    let stem = name.strip_suffix(".trace.safetensors").unwrap_or(&name);
    let profile = PathBuf::from(format!("{stem}.profile.safetensors"));
    let groups = groups.to_string();
    let build = ["semmoe", "profile", "build"].map(OsStr::new);
    let solve = ["semmoe", "solve", "--groups", &groups].map(OsStr::new);
    let flag = OsStr::new;
    run_again(build.into_iter().chain([trace.as_os_str(), flag("--out"), profile.as_os_str()]))?;
    let files =
        [flag("--profile"), profile.as_os_str(), flag("--trace"), trace.as_os_str(), flag("--out"), tables.as_os_str()];
    let tokenizer = tokenizer.into_iter().flat_map(|path| [flag("--tokenizer"), path.as_os_str()]);
    run_again(solve.into_iter().chain(files).chain(tokenizer))
}

fn run_again<'a>(arguments: impl Iterator<Item = &'a OsStr>) -> Result<(), CliError> {
    match Cli::try_parse_from(arguments).map_err(CliError::failed)?.command {
        Command::Profile(ProfileCommand::Build(args)) => super::build::build(args),
        Command::Solve(args) => super::solve::run(&args),
        _ => Err(CliError::failed("only build and solve follow a recording")),
    }
}

/// Describes a recording in one line.
pub(crate) fn describe_record(report: &RecordReport) -> String {
    let resumed = match report.resumed {
        0 => String::new(),
        n => format!(" ({n} of them recorded before)"),
    };
    let refused = match report.refused {
        0 => String::new(),
        n => format!(" ({n} of them rejected by the engine)"),
    };
    format!(
        "{} requests{resumed}, {} tokens, {:.0} tokens/s, {} left out{refused}",
        report.requests,
        report.tokens,
        report.tokens as f64 / report.seconds.max(1e-9),
        report.bad.len()
    )
}

/// Prints which records were skipped, and why.
pub(crate) fn list_bad(bad: &[BadRecord]) {
    for record in bad.iter().take(LISTED_RECORDS) {
        say(&format!("left out: {record}"));
    }
    if bad.len() > LISTED_RECORDS {
        say(&format!("left out: {} more", bad.len() - LISTED_RECORDS));
    }
}

pub(crate) fn failure(error: ProfilerError) -> CliError {
    match error {
        ProfilerError::Cancelled(kept) => {
            say(&kept);
            CliError::interrupted()
        }
        error => CliError::by_side(error.is_input(), error),
    }
}
