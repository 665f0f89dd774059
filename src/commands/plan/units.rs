//! A trace in Mooncake's format: its lengths, and how many units should run which layout.

use std::fmt::Display;
use std::path::Path;

use semmoe_planner::units::{Arrival, UnitMix};
use semmoe_planner::workload::{Lengths, Workload};
use serde::Deserialize;

use super::MAX_TRACE_BYTES;
use crate::commands::read_text;
use crate::error::CliError;

/// Longer prompts and answers are mistakes.
const MAX_TOKENS: u64 = 1 << 20;

/// One line.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct TraceLine {
    /// Milliseconds.
    timestamp: Option<f64>,
    input_length: u64,
    output_length: u64,
}

/// Reads a trace of at least one request.
pub(super) fn read(path: &Path) -> Result<Vec<TraceLine>, CliError> {
    let text = read_text(path, "lengths", MAX_TRACE_BYTES)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let wrong =
        |at: usize, cause: &dyn Display| CliError::input(format!("{} line {}: {cause}", path.display(), at + 1));
    let line = |(at, line): (usize, &str)| {
        let found: TraceLine = serde_json::from_str(line).map_err(|error| wrong(at, &error))?;
        let most = found.input_length.max(found.output_length);
        if most > MAX_TOKENS {
            return Err(wrong(at, &format_args!("a length is {most} tokens, expected at most {MAX_TOKENS}")));
        }
        match found.timestamp.is_none_or(|time| (0.0..=1e15).contains(&time)) {
            true => Ok(found),
            false => Err(wrong(at, &"`timestamp` is not in 0 to 1e15 milliseconds")),
        }
    };
    let lines: Vec<TraceLine> = lines.map(line).collect::<Result<_, _>>()?;
    if lines.is_empty() { Err(CliError::input(format!("{} has no requests", path.display()))) } else { Ok(lines) }
}

/// The workload with the trace's lengths.
pub(super) fn with_lengths(workload: Workload, lines: &[TraceLine]) -> Workload {
    let of = |length: fn(&TraceLine) -> u64| Lengths::of_trace(&lines.iter().map(length).collect::<Vec<_>>());
    let input = of(|line| line.input_length).unwrap_or(workload.input);
    let output = of(|line| line.output_length).unwrap_or(workload.output);
    Workload { input, output, ..workload }
}

/// The trace's requests in order, evenly spaced at `requests_per_second` if the trace has no times.
pub(super) fn arrivals(lines: &[TraceLine], requests_per_second: f64) -> Vec<Arrival> {
    let arrival = |(at, line): (usize, &TraceLine)| Arrival {
        seconds: line.timestamp.map_or(at as f64 / requests_per_second, |time| time / 1e3),
        input_tokens: line.input_length,
        output_tokens: line.output_length,
    };
    let mut arrivals: Vec<Arrival> = lines.iter().enumerate().map(arrival).collect();
    arrivals.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    arrivals
}

/// A summary in one or two sentences.
pub(super) fn text(mix: &UnitMix) -> String {
    let (ep, units) = (mix.best.ep_units, mix.units as f64);
    format!(
        "units under the trace ({} requests, {} units of {} GPUs): {:.0} with slices (TP) and {ep:.0} with whole experts (EP) answer \
         soonest, {:.2} s a request; switching as it runs {:.2} s with {:.1} units EP on average and {} switches\n",
        mix.requests,
        mix.units,
        mix.gpus,
        units - ep,
        mix.best.request_seconds,
        mix.adaptive.request_seconds,
        mix.adaptive.ep_units,
        mix.adaptive.switches
    )
}
