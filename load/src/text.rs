//! The report as text.

use std::fmt::{self, Display, Formatter};

use crate::compare::Comparison;
use crate::latency::LatencySummary;
use crate::report::Report;
use crate::spread::SpreadSummary;
use crate::{Pace, Slo};

/// Maximum number of labels listed.
const LISTED: usize = 16;

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let streamed = if self.stream { "streamed" } else { "not streamed" };
        writeln!(f, "{}{}, {streamed}, {}", self.url, self.route, self.pace)?;
        let counts = &self.requests;
        write!(f, "{} requests: {} ok, {} failed", counts.sent, counts.ok, counts.failed)?;
        if counts.unfinished > 0 {
            write!(f, ", {} unfinished", counts.unfinished)?;
        }
        if counts.warmup > 0 {
            write!(f, ", after {} of warm-up", counts.warmup)?;
        }
        writeln!(f, "; {:.1} s{}", self.seconds, if self.stopped { ", stopped" } else { "" })?;
        writeln!(f, "{:<22} {:>12.1}", "requests/s", self.requests_per_second)?;
        let source =
            if self.output_tokens.events > 0 { " (content events where tokens were not reported)" } else { "" };
        writeln!(f, "{:<22} {:>12.1}{source}", "output tokens/s", self.output_tokens.per_second)?;
        if let Some(goodput) = &self.goodput {
            let (rate, share) = (goodput.requests_per_second, 100.0 * goodput.share);
            writeln!(f, "{:<22} {rate:>12.1} ({share:.1}% held{})", "goodput, requests/s", levels(&goodput.slo))?;
        }
        self.latencies(f)?;
        for error in &self.errors {
            writeln!(f, "{:>12} x {}", error.count, error.kind)?;
        }
        spread(f, "backends", &self.backends)?;
        spread(f, "ranks", &self.ranks)?;
        let generator = &self.generator;
        writeln!(
            f,
            "generator: {} threads, {:.0} us CPU per request, {} connections, {} in flight at most",
            generator.threads, generator.cpu_us_per_request, generator.connections, generator.most_in_flight
        )?;
        for warning in &self.warnings {
            writeln!(f, "note: {warning}")?;
        }
        Ok(())
    }
}

impl Report {
    fn latencies(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let rows = [
            ("first token", &self.ttft_ms),
            ("inter-token", &self.inter_token_ms),
            ("longest gap", &self.longest_gap_ms),
            ("end to end", &self.e2e_ms),
            ("sent late by", &self.send_lateness_ms),
        ];
        if rows.iter().any(|(_, row)| row.is_some()) {
            let names = ["mean", "p50", "p90", "p99", "p99.9", "max"];
            write!(f, "{:<22}", "milliseconds")?;
            names.iter().try_for_each(|name| write!(f, " {name:>10}"))?;
            writeln!(f)?;
        }
        for (name, row) in rows {
            if let Some(LatencySummary { mean, p50, p90, p99, p999, max, .. }) = row {
                write!(f, "{name:<22}")?;
                [mean, p50, p90, p99, p999, max].iter().try_for_each(|value| write!(f, " {value:>10.3}"))?;
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

impl Display for Comparison {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(last) = self.rounds.last() else { return writeln!(f, "stopped before the first round was complete") };
        let stopped = if self.stopped { ", stopped" } else { "" };
        writeln!(
            f,
            "{} rounds with one block per server{stopped}; ratios of the second to the first, round by round",
            self.rounds.len()
        )?;
        let [of_first, of_second] = self.ok_and_failed();
        let [first_errors, second_errors] = self.errors();
        for (name, report, (ok, failed), errors) in
            [("first", &last.first, of_first, first_errors), ("second", &last.second, of_second, second_errors)]
        {
            writeln!(f, "{name:<7} {}{}, {}: {ok} ok, {failed} failed", report.url, report.route, report.pace)?;
            errors.iter().try_for_each(|(kind, count)| writeln!(f, "{count:>12} x {kind}"))?;
        }
        write!(f, "{:<22} {:>12} {:>12} {:>8}", "median of the blocks", "first", "second", "ratio")?;
        writeln!(f, " {:>8} {:>8} {:>9}", "least", "greatest", "above 1")?;
        for ratio in &self.ratios {
            let above = format!("{}/{}", ratio.rounds_above, self.rounds.len());
            write!(f, "{:<22} {:>12.3} {:>12.3} {:>8.3}", ratio.figure, ratio.first, ratio.second, ratio.median)?;
            writeln!(f, " {:>8.3} {:>8.3} {above:>9}", ratio.least, ratio.greatest)?;
        }
        // Print each note only once, as worded in the last round.
        let (first, second) = (&last.first.warnings, &last.second.warnings);
        let mut notes = first.iter().chain(second.iter().filter(|note| !first.contains(note)));
        notes.try_for_each(|note| writeln!(f, "note: {note}"))
    }
}

/// Service levels, each preceded by a comma.
fn levels(slo: &Slo) -> String {
    let levels = [("first token", slo.ttft_ms), ("mean gap", slo.itl_ms), ("end to end", slo.e2e_ms)];
    levels.iter().filter_map(|(name, level)| Some(format!(", {name} <= {} ms", (*level)?))).collect()
}

impl Display for Pace {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed { concurrency } => write!(f, "closed loop of {concurrency}"),
            Self::Poisson { per_second, seed } => {
                write!(f, "open loop at {per_second}/s (seed {seed}), latencies measured from due times")
            }
            Self::Recorded { arrivals, speed } => {
                let arrivals = arrivals.display();
                write!(f, "open loop of {arrivals} at speed {speed}, latencies measured from due times")
            }
        }
    }
}

fn spread(f: &mut Formatter<'_>, name: &str, spread: &SpreadSummary) -> fmt::Result {
    let Some(ratio) = spread.max_over_mean else { return writeln!(f, "{name}: not reported") };
    write!(f, "{name}: {} seen, max/mean {ratio:.3}:", spread.requests.len())?;
    for (label, count) in spread.requests.iter().take(LISTED) {
        write!(f, " {label} {count},")?;
    }
    let more = spread.requests.len().saturating_sub(LISTED);
    if more > 0 {
        write!(f, " {more} more,")?;
    }
    writeln!(f, " {} not reported", spread.not_told)
}
