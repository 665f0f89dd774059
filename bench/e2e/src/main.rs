//! End-to-end benchmark: ranks over limited links, real prompts, recorded arrivals; round robin over contiguous experts
//! against affinity with E, and attention tp without and with SRS and SAG. See README.md.
//!
//! | module | what |
//! |---|---|
//! | `args` | the command line |
//! | `configs` | what is compared |
//! | `prepare` | tables, made with semmoe's own commands |
//! | `contest`, `measure` | link rates for communication shares, rounds, blocks of load |
//! | `analysis`, `results` | Amdahl's law, predicted bytes, verdicts |
//! | `report`, `pictures` | tables and pictures |
//! | `figures` | figures of the Sem-MoE paper with more than two configurations |

mod analysis;
mod args;
mod configs;
mod contest;
mod figures;
mod measure;
mod pictures;
mod prepare;
mod report;
mod results;

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser as _;
use semmoe_bench_e2e::program::{self, say};
use semmoe_bench_e2e::{counters, error, network, unit};
use serde_json::json;

use args::{Args, AttentionArg};
use configs::{DP, TP};
use contest::{Schedule, Stage};
use error::BenchError;
use figures::Figure;
use measure::Traffic;
use network::{Namespaces, Network, Shape};
use prepare::{Workshop, chats};
use results::Outcome;

fn main() -> ExitCode {
    let args = Args::parse().settled();
    program::main("bench/e2e", run(&args))
}

async fn run(args: &Args) -> Result<(), BenchError> {
    if args.clean {
        let removed = network::clean()?;
        say(&format!("removed {} namespaces", removed.len()));
        return Ok(());
    }
    let began = Instant::now();
    if !args.semmoe.is_file() {
        return Err(BenchError::input(format!("{}: expected the semmoe program", args.semmoe.display())));
    }
    if args.redundant > 0 && args.attention.contains(&AttentionArg::Tp) {
        return Err(BenchError::input("--redundant needs --attention dp: tables for attention tp have no replicas"));
    }
    // Declared first, so dropped after everything that uses it.
    let network = if args.loopback {
        Network::Loopback
    } else {
        Network::Namespaces(Namespaces::create(Shape::flat(args.ranks))?)
    };
    let folder = tempfile::tempdir().map_err(BenchError::file(Path::new("the temporary folder")))?;
    let (profile, served) = (folder.path().join("profile.jsonl"), folder.path().join("served.jsonl"));
    chats(&args.profile_prompts, &profile, args.limit)?;
    chats(&args.prompts, &served, args.limit)?;
    let stage = stage(args, &network, folder.path())?;
    let say = |line: &str| say(&format!("{:5.0} s  {line}", began.elapsed().as_secs_f64()));
    if args.figure == Some(Figure::SixD) {
        return figures::forced(&stage, &say).await.and_then(|text| figures::write(args, &text));
    }
    say("recording routing");
    let unit = stage.unit(DP.attention, DP.before, None).await?;
    let recorded = stage.workshop.record(&unit.url, &profile, &served).await?;
    unit.stop().await?;
    if let Some(figure) = args.figure {
        let text = figures::three_systems(figure, &stage, &recorded, &say).await?;
        return figures::write(args, &text);
    }
    let mut outcomes = Vec::new();
    for attention in &args.attention {
        let contest = if *attention == AttentionArg::Dp { DP } else { TP };
        outcomes.push(stage.run(contest, &recorded, &say).await?);
    }
    write(args, &outcomes, began.elapsed().as_secs_f64())
}

fn stage<'a>(args: &'a Args, network: &'a Network, folder: &'a Path) -> Result<Stage<'a>, BenchError> {
    let arrivals = semmoe_load::read_arrivals(&args.arrivals).map_err(BenchError::input)?;
    let last = arrivals.last().map_or(0.0, std::time::Duration::as_secs_f64);
    if last <= 0.0 {
        return Err(BenchError::input(format!("{} has arrivals at one time only", args.arrivals.display())));
    }
    let model_name = fs::canonicalize(&args.model).map_err(BenchError::file(&args.model))?;
    let model_name = model_name.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let secret = folder.join("rank.secret");
    unit::write_secret(&secret)?;
    // Prefix reuse would measure the cache, as prompts repeat. Shared memory would bypass the limited links.
    let arguments = ["--no-prefix-reuse", "--wire", &args.wire, "--transport", "tcp"].map(str::to_owned).to_vec();
    Ok(Stage {
        workshop: Workshop {
            semmoe: &args.semmoe,
            model: &args.model,
            folder,
            ranks: args.ranks,
            redundant: args.redundant,
            max_tokens: args.max_tokens,
        },
        network,
        traffic: Traffic {
            prompts: folder.join("served.jsonl"),
            api: semmoe_load::Api::Chat,
            arrivals: args.arrivals.clone(),
            arrivals_per_second: arrivals.len() as f64 / last,
            max_tokens: args.max_tokens,
            streamed: args.streamed,
            concurrency: usize::from(args.clients) * usize::from(args.ranks),
            seconds: args.seconds,
            ramp: args.seconds / 4.0,
        },
        schedule: Schedule {
            shares: args.shares.clone(),
            rates: args.rates.iter().map(|megabits| (megabits * 1e6) as u64).collect(),
            rounds: args.rounds.into(),
            open_rounds: args.open_rounds.into(),
            loads: args.loads.clone(),
        },
        model_name,
        secret,
        arguments,
        step_tokens: args.step_tokens,
        running: args.clients,
    })
}

/// Prints the tables, writes tables, pictures and JSON into the folder, and updates the page beside the folder that has
/// markers for the tables.
fn write(args: &Args, outcomes: &[Outcome], seconds: f64) -> Result<(), BenchError> {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let summaries: Vec<_> = outcomes.iter().map(Outcome::summary).collect();
    let text = headline(args, cores, seconds) + &report::describe(outcomes, &summaries);
    fs::create_dir_all(&args.out).map_err(BenchError::file(&args.out))?;
    let mut json = json!({"cores": cores, "loopback": args.loopback, "quick": args.quick, "seconds": seconds, "summaries": summaries, "contests": outcomes});
    results::shorten(&mut json);
    let mut files = vec![("results.md", text.clone()), ("results.json", format!("{json}\n"))];
    files.extend(pictures::pictures(outcomes));
    for (name, content) in files {
        let path = args.out.join(name);
        fs::write(&path, content).map_err(BenchError::file(&path))?;
    }
    let page = args.out.join("../README.md");
    if let Some(new) = fs::read_to_string(&page).ok().and_then(|old| report::in_page(&old, &text)) {
        fs::write(&page, new).map_err(BenchError::file(&page))?;
        say(&format!("the tables are in {} too", page.display()));
    }
    // Ignore a closed pipe: the reader has left.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// One sentence that describes the run.
fn headline(args: &Args, cores: usize, seconds: f64) -> String {
    let place = if args.loopback {
        "one loopback, links not limited"
    } else {
        "a network namespace each, links limited by tbf"
    };
    let streamed = if args.streamed { " (streamed)" } else { "" };
    let replicas = match args.redundant {
        0 => String::new(),
        slots => format!(", tables with {slots} redundant slots a layer"),
    };
    let trial = if args.quick { "A quick trial, rough: " } else { "" };
    format!(
        "{trial}{} ranks on {cores} cores, {place}, rows in {}{replicas}; {} prompts; median (minimum to maximum) of {} interleaved rounds of {} s at \
         saturation{streamed} and {} of {} s as requests arrive; {seconds:.0} s in all.\n\n",
        args.ranks,
        args.wire,
        args.prompts.display(),
        args.rounds,
        args.seconds,
        args.open_rounds,
        measure::OPEN * args.seconds
    )
}
