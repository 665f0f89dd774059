//! Switch policies on traces of load over one simulated unit: every policy of `semmoe-planner` against both static
//! layouts and an oracle. All figures are simulated; bench/switch/README.md has the table, its command and the
//! assumptions.

mod contest;
mod engines;
mod error;
mod report;
#[cfg(test)]
mod tests;
mod traces;
mod unit;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use semmoe_planner::policy::{ByLayout, Settings, TtftTarget};

use crate::contest::{Cell, Slo, compete};
use crate::engines::{Engine, Rates};
use crate::error::SwitchError;
use crate::report::{Label, Line, classes, markdown};
use crate::traces::{Kind, Part};

/// Runs every switch policy on traces of load and prints a Markdown table.
#[derive(Debug, Parser)]
#[command(name = "semmoe-bench-switch")]
struct Cli {
    /// Traces of load.
    #[arg(long, value_delimiter = ',', default_values_t = Kind::ALL, value_enum)]
    traces: Vec<Kind>,
    /// Measured step curves instead of the three published ones: a JSON list of {"name", "tp", "ep"}, curves as
    /// [[sequences, milliseconds], ...].
    #[arg(long, value_name = "FILE")]
    curves: Option<PathBuf>,
    /// Only these engines.
    #[arg(long, value_delimiter = ',')]
    engines: Vec<String>,
    /// Prefill rates of the unit in thousand tokens per second, TP/EP.
    #[arg(long, value_delimiter = ',', default_value = "28/28,28/45,45/45")]
    prefill: Vec<String>,
    /// Number of seeds for synthetic traces and step noise.
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Selects seeds and the part of recorded hours; settings were chosen on `tune`.
    #[arg(long, value_enum, default_value_t = Part::Judge)]
    part: Part,
    /// SLO: seconds to the first token.
    #[arg(long, default_value_t = 2.0)]
    slo_ttft: f64,
    /// SLO: milliseconds per token after it.
    #[arg(long, default_value_t = 80.0)]
    slo_tpot: f64,
    /// Factors by which the adaptive policy's prior is wrong, TP/EP.
    #[arg(long, default_value = "1/1")]
    wrong_prior: String,
    /// Head start in the queue, under every policy, of priority 1, which every fifth request has. Prints the table of
    /// two classes.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    priority_seconds: f64,
    /// Skip the oracle's search.
    #[arg(long)]
    no_oracle: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Settings of the adaptive policy, for example `horizon_seconds=2`.
    #[arg(long, value_delimiter = ',', value_name = "NAME=NUMBER")]
    set: Vec<String>,
}

fn main() -> ExitCode {
    match table(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Ignore errors of standard error itself.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Two positive numbers, TP's and EP's.
fn pair(option: &str, text: &str) -> Result<ByLayout<f64>, SwitchError> {
    let wrong = || SwitchError::Input { found: format!("{option} {text}"), expected: "TP/EP, two positive numbers" };
    let (tp, ep) = text.split_once('/').ok_or_else(wrong)?;
    let number = |text: &str| text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
    Ok(ByLayout { tp: number(tp).ok_or_else(wrong)?, ep: number(ep).ok_or_else(wrong)? })
}

fn rates(text: &str) -> Result<Rates, SwitchError> {
    let ByLayout { tp, ep } = pair("--prefill", text)?;
    Ok(ByLayout { tp: 1e3 * tp, ep: 1e3 * ep })
}

fn engines(cli: &Cli) -> Result<Vec<Engine>, SwitchError> {
    let mut engines = match &cli.curves {
        Some(path) => engines::read(path)?,
        None => engines::published()?,
    };
    if let Some(name) = cli.engines.iter().find(|name| engines.iter().all(|engine| engine.name != **name)) {
        return Err(SwitchError::Input { found: format!("--engines {name}"), expected: "the name of a curve" });
    }
    engines.retain(|engine| cli.engines.is_empty() || cli.engines.contains(&engine.name));
    Ok(engines)
}

/// The default settings with `changes` applied.
fn settings(changes: &[String]) -> Result<Settings, SwitchError> {
    let mut settings = Settings::default();
    let mut ttft = 0.0;
    for change in changes {
        let wrong =
            || SwitchError::Input { found: format!("--set {change}"), expected: "a setting's name, = and a number" };
        let (name, value) = change.split_once('=').ok_or_else(wrong)?;
        let slot = match name {
            "horizon_seconds" => &mut settings.horizon_seconds,
            "least_gain" => &mut settings.least_gain,
            "margin" => &mut settings.margin,
            "dwell_seconds" => &mut settings.dwell_seconds,
            "fast_seconds" => &mut settings.fast_seconds,
            "slow_seconds" => &mut settings.slow_seconds,
            "guard_close" => &mut settings.guard_close,
            "guard_reopen" => &mut settings.guard_reopen,
            "ttft_seconds" => &mut ttft,
            _ => return Err(wrong()),
        };
        *slot = value.parse().map_err(|_| wrong())?;
    }
    if ttft > 0.0 {
        settings.ttft.push(TtftTarget { priority: 1, seconds: ttft });
    }
    Ok(settings)
}

fn table(cli: &Cli) -> Result<(), SwitchError> {
    let engines = engines(cli)?;
    let settings = settings(&cli.set)?;
    let mut lines = Vec::new();
    for &kind in &cli.traces {
        for engine in &engines {
            for prefill in &cli.prefill {
                let first = if cli.part == Part::Tune { 1001 } else { 1 };
                let results = (first..first + cli.seeds.max(1))
                    .map(|seed| {
                        let cell = Cell {
                            engine,
                            rates: rates(prefill)?,
                            kind,
                            seed,
                            part: cli.part,
                            slo: Slo { ttft_seconds: cli.slo_ttft, tpot_seconds: cli.slo_tpot / 1e3 },
                            priority_seconds: cli.priority_seconds,
                            wrong: pair("--wrong-prior", &cli.wrong_prior)?,
                        };
                        compete(cell, &settings, seed == first && !cli.no_oracle)
                    })
                    .collect::<Result<Vec<_>, _>>()?;
                let label = Label {
                    one_sided: engine.is_one_sided(rates(prefill)?),
                    trace: kind.name(),
                    engine: engine.name.clone(),
                    prefill: prefill.clone(),
                };
                lines.push(Line::new(label, &results));
            }
        }
    }
    let mut out = std::io::stdout().lock();
    if cli.json {
        let text = serde_json::to_string_pretty(&lines).map_err(std::io::Error::from)?;
        writeln!(out, "{text}")?;
    } else if cli.priority_seconds != 0.0 {
        write!(out, "{}", classes(&lines))?;
    } else {
        write!(out, "{}", markdown(&lines))?;
    }
    Ok(())
}
