//! The measurements of a run.

use serde::Serialize;

use crate::latency::LatencySummary;
use crate::spread::SpreadSummary;
use crate::stats::Stats;
use crate::{Limit, LoadOptions, Pace, Slo};

/// If the 99th percentile of lateness exceeds this, the generator itself distorts the measurement.
const LATE_MS: f64 = 10.0;
/// CPU utilisation per thread beyond which the generator is at its limit.
const BUSY: f64 = 0.9;

/// The results of a run, for printing and as JSON. Times are in milliseconds unless the name says otherwise. A report
/// never contains prompts or secrets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The server.
    pub url: String,
    /// The route's path.
    pub route: &'static str,
    /// The model requested.
    pub model: Option<String>,
    /// Whether answers were streamed.
    pub stream: bool,
    /// How requests were paced. In an open loop, latencies are measured from the requests' due times.
    #[serde(rename = "loop")]
    pub pace: Pace,
    /// Whether the user stopped the run.
    pub stopped: bool,
    /// The period that rates cover, in seconds.
    pub seconds: f64,
    /// Requests in the measured period.
    pub requests: RequestCounts,
    /// Complete responses per second.
    pub requests_per_second: f64,
    /// Tokens of complete responses.
    pub output_tokens: TokenReport,
    /// Requests that meet the service levels; `None` if none were set.
    pub goodput: Option<Goodput>,
    /// Time to the first content event; only for streams.
    pub ttft_ms: Option<LatencySummary>,
    /// Time between content events, including those of requests that failed later; only for streams.
    pub inter_token_ms: Option<LatencySummary>,
    /// The longest gap of each complete response; only for streams.
    pub longest_gap_ms: Option<LatencySummary>,
    /// Time to the last byte of complete responses.
    pub e2e_ms: Option<LatencySummary>,
    /// How late the generator sent requests; only for open loops.
    pub send_lateness_ms: Option<LatencySummary>,
    /// Failed requests by kind, most frequent first.
    pub errors: Vec<ErrorCount>,
    /// Requests by backend and rank, according to the gateway's `x-semmoe-*` headers.
    pub ranks: SpreadSummary,
    /// Requests by backend.
    pub backends: SpreadSummary,
    /// The load generator's own activity and resource use.
    pub generator: Generator,
    /// Caveats about the figures.
    pub warnings: Vec<String>,
}

/// Measured requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RequestCounts {
    /// Number of requests sent.
    pub sent: u64,
    /// Completely answered.
    pub ok: u64,
    /// Number of failed requests.
    pub failed: u64,
    /// Number of requests still in flight when the user stopped the run.
    pub unfinished: u64,
    /// Number of completed requests without content.
    pub without_content: u64,
    /// Number of requests sent during the warm-up, which are not measured.
    pub warmup: u64,
}

/// Tokens of complete responses.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TokenReport {
    /// Tokens per second.
    pub per_second: f64,
    /// Tokens reported by engines.
    pub told: u64,
    /// Number of responses with a reported count.
    pub answers_that_told: u64,
    /// Content events of responses without a count: at least one token each, possibly more.
    pub events: u64,
}

/// Requests that meet all latency targets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The service levels.
    pub slo: Slo,
    /// Good requests per second.
    pub requests_per_second: f64,
    /// Good requests as a fraction of all that ended, including failed ones.
    pub share: f64,
}

/// Failed requests of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorCount {
    /// The kind.
    pub kind: String,
    /// Number of requests.
    pub count: u64,
}

/// The load generator's own activity and resource use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Generator {
    /// Number of sending threads.
    pub threads: usize,
    /// CPU time of the process during the run, in seconds.
    pub cpu_seconds: f64,
    /// CPU time per request, in microseconds.
    pub cpu_us_per_request: f64,
    /// Number of connections opened.
    pub connections: u64,
    /// Maximum number of requests in flight.
    pub most_in_flight: usize,
    /// Number of open-loop requests that waited because too many were in flight.
    pub held_back: u64,
    /// Number of connections on which the server sent unsolicited bytes.
    pub stray_bytes: u64,
    /// Number of distinct prompts.
    pub prompts: usize,
    /// Number of prompts in the file that the route does not support.
    pub prompts_left_out: usize,
}

/// Measurements from `edge` that complement the statistics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) seconds: f64,
    pub(crate) sent: u64,
    pub(crate) stopped: bool,
    /// Index of the first request's prompt.
    pub(crate) first_prompt: u64,
    /// How long the threads ran, including the warm-up and the last responses.
    pub(crate) wall_seconds: f64,
    /// The generator's own resource use, without its CPU time per request.
    pub(crate) generator: Generator,
}

impl Report {
    pub(crate) fn new(options: &LoadOptions, stats: &Stats, facts: &Facts) -> Self {
        let rate = |count: u64| if facts.seconds > 0.0 { count as f64 / facts.seconds } else { 0.0 };
        let ended = stats.ok + stats.failed;
        let sent = facts.sent.max(ended);
        let requests = sent.saturating_add(options.warmup).max(1);
        let cpu_us_per_request = facts.generator.cpu_seconds * 1e6 / requests as f64;
        let mut errors: Vec<_> =
            stats.failures.iter().map(|(kind, count)| ErrorCount { kind: kind.to_string(), count: *count }).collect();
        errors.sort_by_key(|error| std::cmp::Reverse(error.count));
        let mut report = Self {
            url: options.url.to_string(),
            route: options.api.path(),
            model: options.model.clone(),
            stream: options.stream,
            pace: options.pace.clone(),
            stopped: facts.stopped,
            seconds: facts.seconds,
            requests: RequestCounts {
                sent,
                ok: stats.ok,
                failed: stats.failed,
                unfinished: sent - ended,
                without_content: stats.no_content,
                warmup: options.warmup,
            },
            requests_per_second: rate(stats.rated.ok),
            output_tokens: TokenReport {
                per_second: rate(stats.rated.tokens),
                told: stats.reported.1,
                answers_that_told: stats.reported.0,
                events: stats.counted.1,
            },
            goodput: options.slo.is_given().then(|| Goodput {
                slo: options.slo,
                requests_per_second: rate(stats.rated.good),
                share: stats.good as f64 / ended.max(1) as f64,
            }),
            ttft_ms: stats.ttft.summary(),
            inter_token_ms: stats.gaps.summary(),
            longest_gap_ms: stats.longest_gap.summary(),
            e2e_ms: stats.e2e.summary(),
            send_lateness_ms: stats.late.summary(),
            errors,
            ranks: stats.ranks.summary(),
            backends: stats.backends.summary(),
            generator: Generator { cpu_us_per_request, ..facts.generator },
            warnings: Vec::new(),
        };
        report.warnings = report.warn(options, facts);
        report
    }

    fn warn(&self, options: &LoadOptions, facts: &Facts) -> Vec<String> {
        let (mut warnings, generator) = (Vec::new(), &self.generator);
        let mut warn = |when: bool, text: String| warnings.extend(when.then_some(text));
        let late = self.send_lateness_ms.map_or(0.0, |late| late.p99);
        warn(
            late > LATE_MS,
            format!(
                "the generator could not keep up: 1% of the requests were sent {late:.1} ms or more after they were due"
            ),
        );
        let held = generator.held_back;
        warn(
            held > 0,
            format!(
                "{held} requests waited because {} were in flight; they are measured from their due times",
                options.max_in_flight
            ),
        );
        let cores = generator.cpu_seconds / facts.wall_seconds.max(1e-9);
        warn(
            facts.wall_seconds > 1.0 && cores > BUSY * generator.threads as f64,
            format!(
                "the generator used {cores:.1} cores with {} threads, and may itself be the bottleneck",
                generator.threads
            ),
        );
        let wanted = facts.first_prompt.saturating_add(self.requests.sent).saturating_add(options.warmup);
        warn(
            wanted > generator.prompts as u64,
            format!(
                "{wanted} requests from {} prompts: prompts were repeated, so prefix caches contain them",
                generator.prompts
            ),
        );
        let left_out = generator.prompts_left_out;
        warn(
            left_out > 0,
            format!("{left_out} prompts in the file were skipped, because {} does not support them", self.route),
        );
        let stray = generator.stray_bytes;
        warn(stray > 0, format!("on {stray} connections, the server sent bytes that belong to no response"));
        let unreported = self.requests.ok - self.output_tokens.answers_that_told;
        warn(unreported > 0, format!("{unreported} responses did not report token counts: events are counted"));
        let empty = self.requests.without_content;
        warn(empty > 0, format!("{empty} complete responses had no content"));
        if let (Limit::Requests(asked), false) = (options.limit, self.stopped) {
            let sent = self.requests.sent;
            warn(sent < asked, format!("the arrival file ended after {sent} of {asked} requests"));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stats::{Answered, Sample, Tokens};

    /// One answer to a request that was sent late by `late`.
    fn stats(late: Duration) -> Stats {
        let mut stats = Stats::new(Slo::default());
        let (e2e, tokens) = (Duration::from_millis(5), Tokens::Reported(10));
        let answered = Answered { ttft: None, e2e, mean_gap: None, longest_gap: None, tokens, content: true };
        let (late, result) = (Some(late), Ok(answered));
        let (backend, rank) = (None, None);
        stats.request(&Sample { measured: true, in_window: true, late, result, has_head: true, backend, rank });
        stats
    }

    fn facts() -> Facts {
        Facts {
            seconds: 2.0,
            sent: 1,
            stopped: false,
            first_prompt: 0,
            wall_seconds: 2.0,
            generator: Generator {
                threads: 2,
                cpu_seconds: 1.0,
                cpu_us_per_request: 0.0,
                connections: 1,
                most_in_flight: 1,
                held_back: 0,
                stray_bytes: 0,
                prompts: 1,
                prompts_left_out: 0,
            },
        }
    }

    fn facts_but(change: fn(&mut Facts)) -> Facts {
        let mut facts = facts();
        change(&mut facts);
        facts
    }

    #[test]
    fn a_generator_at_its_limit_says_so() {
        let pace = Pace::Poisson { per_second: 1.0, seed: 0 };
        let options = LoadOptions::new("http://a".parse().unwrap(), "p".into(), pace, Limit::Requests(1));
        let calm = Duration::from_millis(9);
        for (late, facts, expected) in [
            (calm, facts(), None),
            (Duration::from_millis(50), facts(), Some("the generator could not keep up")),
            (calm, facts_but(|it| it.generator.cpu_seconds = 3.7), Some("the generator used 1.9 cores with 2 threads")),
            (calm, facts_but(|it| (it.generator.cpu_seconds, it.wall_seconds) = (3.7, 12.0)), None),
            (calm, facts_but(|it| it.generator.held_back = 3), Some("3 requests waited because 10000 were in flight")),
            (
                calm,
                facts_but(|it| (it.generator.prompts, it.first_prompt) = (8, 8)),
                Some("9 requests from 8 prompts: prompts were repeated"),
            ),
            (
                calm,
                facts_but(|it| it.generator.stray_bytes = 2),
                Some("on 2 connections, the server sent bytes that belong to no response"),
            ),
        ] {
            let report = Report::new(&options, &stats(late), &facts);
            let found: Vec<_> = report.warnings.iter().map(String::as_str).collect();
            assert_eq!(found.len(), usize::from(expected.is_some()), "{found:?}");
            assert!(expected.is_none_or(|expected| found[0].starts_with(expected)), "{found:?}");
        }
    }

    #[test]
    fn rates_are_over_the_measured_time() {
        let pace = Pace::Closed { concurrency: 1 };
        let options = LoadOptions::new("http://a".parse().unwrap(), "p".into(), pace, Limit::Requests(1));
        let report = Report::new(&options, &stats(Duration::ZERO), &Facts { sent: 4, stopped: true, ..facts() });
        assert_eq!((report.requests_per_second, report.output_tokens.per_second), (0.5, 5.0));
        assert_eq!((report.requests.unfinished, report.goodput), (3, None));
        let nothing = Report::new(&options, &Stats::new(Slo::default()), &Facts { seconds: 0.0, sent: 0, ..facts() });
        assert_eq!((nothing.requests_per_second, nothing.e2e_ms), (0.0, None));
    }
}
