//! Routing policies replayed on recorded arrivals: the gateway's routing code, real prompts with recorded routing, and
//! simulated ranks. All figures are simulated; README.md has the tables, their commands and the assumptions.

mod arrivals;
mod corpus;
mod error;
mod model;
mod peers;
mod run;
mod unit;
mod workload;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use semmoe_routing::{Settings, TablePrice};
use semmoe_tables::Tables;

use crate::arrivals::{Arrival, BLOCK_TOKENS};
use crate::corpus::Corpus;
use crate::error::ReplayError;
use crate::model::{Model, StepTime};
use crate::run::{Figures, Setup, run};
use crate::unit::Limits;

/// Replays arrivals on simulated ranks under every policy and prints Markdown tables.
#[derive(Debug, Parser)]
#[command(name = "semmoe-bench-replay")]
struct Cli {
    /// Tables for attention dp; they define the unit's ranks.
    #[arg(long, value_name = "FILE")]
    tables: PathBuf,
    /// Recorded routing that the tables were not solved on; the text of the prompts.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// The trace's requests, JSON Lines with "domain", to keep each conversation to one kind.
    #[arg(long, value_name = "FILE")]
    requests: Option<PathBuf>,
    /// Policies to compare.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "round_robin,least_load,prefix,dynamo,llm_d,sglang_cache_aware,affinity_paper,affinity"
    )]
    policies: Vec<String>,
    /// Communication shares of a prefill step with random placement.
    #[arg(long, value_delimiter = ',', default_value = "0,0.1,0.2,0.4,0.6")]
    communication: Vec<f64>,
    /// Offered load: the work of arriving requests, uncached and placed at random, over the ranks' capacity if steps
    /// had no fixed cost and ranks did not wait for each other.
    #[arg(long, value_delimiter = ',', default_value = "0.05,0.1,0.15,0.2,0.25,0.3,0.4,0.5")]
    load: Vec<f64>,
    /// Model of step times.
    #[arg(long, value_enum, default_value_t = Model::Full)]
    model: Model,
    /// Part of the arrivals: settings are chosen on the first half and judged on the second.
    #[arg(long, value_enum, default_value_t = Part::Second)]
    part: Part,
    /// Only the first N requests of it.
    #[arg(long, default_value_t = u32::MAX)]
    limit: u32,
    /// KV cache capacity of a rank for running sequences, in tokens.
    #[arg(long, default_value_t = 524_288)]
    kv_tokens: u64,
    /// Prefix cache capacity of a rank, in tokens.
    #[arg(long, default_value_t = 524_288)]
    cache_tokens: u32,
    /// Most tokens that a rank computes in one step.
    #[arg(long, default_value_t = 1024)]
    step_tokens: u32,
    /// Most sequences that a rank decodes at once.
    #[arg(long, default_value_t = 256)]
    sequences: u32,
    /// Router settings that differ from the defaults, as keys of `[routing.settings]`.
    #[arg(long, value_delimiter = ',', value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Seed for the assignment of text to prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Mooncake's trace (.jsonl) or Azure's (.csv).
    #[arg(value_name = "ARRIVALS")]
    arrivals: PathBuf,
}

/// A part of the arrivals, by number.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Part {
    First,
    Second,
    All,
}

impl Part {
    fn of(self, mut arrivals: Vec<Arrival>) -> Vec<Arrival> {
        let half = arrivals.len() / 2;
        match self {
            Part::First => arrivals.truncate(half),
            Part::Second => drop(arrivals.drain(..half)),
            Part::All => {}
        }
        let first = arrivals.first().map_or(0.0, |arrival| arrival.at);
        arrivals.iter_mut().for_each(|arrival| arrival.at -= first);
        arrivals
    }
}

fn main() -> ExitCode {
    match replay(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Ignore errors of standard error itself.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn replay(cli: &Cli) -> Result<(), ReplayError> {
    check(cli)?;
    let mut arrivals = cli.part.of(arrivals::read(&cli.arrivals)?);
    arrivals.truncate(cli.limit as usize);
    let corpus = Corpus::open(&cli.tables, &cli.trace, cli.requests.as_deref())?;
    let tables = Tables::open(&cli.tables)?;
    let prices = TablePrice::of_ranks(corpus.ranks, tables.price(), tables.sequence_price());
    let jobs = workload::jobs(&arrivals, &corpus, cli.seed);
    let settings: Settings = toml::from_str(&cli.settings.join("\n")).map_err(|error| ReplayError::Input {
        found: format!("--settings: {}", error.message()),
        expected: "KEY=VALUE",
    })?;
    let limits = Limits {
        step_tokens: cli.step_tokens,
        sequences: cli.sequences as usize,
        cache_blocks: cli.cache_tokens / BLOCK_TOKENS,
        kv_tokens: cli.kv_tokens,
    };
    for &communication in &cli.communication {
        let time = StepTime::new(cli.model, communication, corpus.ranks);
        let mut loads = Vec::new();
        for &load in &cli.load {
            let speed = load * f64::from(corpus.ranks) / work_per_second(&arrivals, &time, corpus.ranks);
            let setup =
                Setup { jobs: &jobs, ranks: corpus.ranks, prices: &prices, limits, time, speed, settings: &settings };
            let title = format!("{} ranks, communication {communication}, load {load}", corpus.ranks);
            loads.push(table(&title, &cli.policies, setup)?);
        }
        summary(&format!("{} ranks, communication {communication}, all loads", corpus.ranks), &cli.policies, &loads)?;
    }
    Ok(())
}

fn check(cli: &Cli) -> Result<(), ReplayError> {
    let wrong = |found: String, expected| Err(ReplayError::Input { found, expected });
    if let Some(share) = cli.communication.iter().find(|share| !(0.0..0.99).contains(*share)) {
        return wrong(format!("--communication {share}"), "a share from 0 to 0.98");
    }
    if let Some(load) = cli.load.iter().find(|load| !(0.001..100.0).contains(*load)) {
        return wrong(format!("--load {load}"), "0.001 to 100");
    }
    if cli.step_tokens <= cli.sequences || cli.sequences == 0 {
        return wrong(
            format!("--step-tokens {} --sequences {}", cli.step_tokens, cli.sequences),
            "more tokens than sequences, at least one",
        );
    }
    if cli.limit == 0 {
        return wrong("--limit 0".to_owned(), "at least 1");
    }
    Ok(())
}

/// Rank-seconds of work that arrive per second at recorded speed.
fn work_per_second(arrivals: &[Arrival], time: &StepTime, ranks: u16) -> f64 {
    let work: f64 = arrivals.iter().map(|a| time.work(a.prompt_tokens, a.output_tokens, ranks)).sum();
    let last = arrivals.last().map_or(0.0, |arrival| arrival.at);
    work / last.max(1e-3)
}

/// Prints the figures of each policy, and returns them.
fn table(title: &str, policies: &[String], setup: Setup<'_>) -> Result<Vec<Figures>, ReplayError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n### {title}\n")?;
    writeln!(
        out,
        "| policy | within SLO | goodput, requests/s | all, requests/s | TTFT median, s | TTFT p99, s | per token p99, ms | LAR | prefix hits | tokens, max/mean | sequences, max/mean | preempted |"
    )?;
    writeln!(out, "|{}", "---|".repeat(12))?;
    let mut all = Vec::new();
    for policy in policies {
        let figures = run(policy, setup)?;
        let Figures { lar, cached, good, goodput, throughput, .. } = figures;
        let Figures { ttft_median, ttft_p99, per_token_p99, tokens_max_over_mean, .. } = figures;
        let Figures { sequences_max_over_mean, preemptions, .. } = figures;
        writeln!(
            out,
            "| `{policy}` | {good:.4} | {goodput:.3} | {throughput:.3} | {ttft_median:.3} | {ttft_p99:.2} | {:.1} | {lar:.4} | {cached:.4} | {tokens_max_over_mean:.3} | {sequences_max_over_mean:.3} | {preemptions} |",
            per_token_p99 * 1e3
        )?;
        out.flush()?;
        all.push(figures);
    }
    Ok(all)
}

/// The highest goodput of each policy over all loads, with its other figures at that load.
fn summary(title: &str, policies: &[String], loads: &[Vec<Figures>]) -> Result<(), ReplayError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n### {title}\n")?;
    writeln!(out, "| policy | highest goodput, requests/s | TTFT p99 there, s | LAR there | prefix hits there |")?;
    writeln!(out, "|{}", "---|".repeat(5))?;
    for (index, policy) in policies.iter().enumerate() {
        let best = loads.iter().map(|figures| &figures[index]).max_by(|a, b| a.goodput.total_cmp(&b.goodput));
        if let Some(Figures { goodput, ttft_p99, lar, cached, .. }) = best {
            writeln!(out, "| `{policy}` | {goodput:.3} | {ttft_p99:.2} | {lar:.4} | {cached:.4} |")?;
        }
    }
    Ok(out.flush()?)
}
