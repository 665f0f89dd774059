//! Latency and output from the clients' perspective: time to first token, between tokens and to the end, and tokens.
//!
//! Each request is observed once, when it ends: a histogram takes a lock, and a stream has thousands of tokens.

use std::time::Duration;

use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use semmoe_engines::Route;

use super::labels::{Counter, Family, Gauge, Histogram, Histograms};
use super::requests::{Done, NONE, OTHER};

/// Buckets from milliseconds to a few seconds.
pub(super) const TO_SECONDS: [f64; 9] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5];
/// Continues [`TO_SECONDS`] for whole responses: from an embedding to a long generation.
const TO_MINUTES: [f64; 8] = [5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0];
/// Buckets for the time to first token; latency objectives are between 0.1 and 10 s.
const FIRST_TOKEN_SECONDS: [f64; 16] =
    [0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0];
/// Buckets for the inter-token latency; 20 ms correspond to 50 tokens per second and user.
const INTER_TOKEN_SECONDS: [f64; 14] =
    [0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0];

labels!(AnswerLabels { backend: String, model: String, route: &'static str });

// `counted`: `usage` or `events`.
labels!(OutputLabels { backend: String, model: String, route: &'static str, counted: &'static str });

// The label of an exemplar, which identifies a traced request.
labels!(TraceLabels { trace_id: String });

/// A histogram whose buckets carry the last traced request as an exemplar (in OpenMetrics).
type Traced = HistogramWithExemplars<TraceLabels>;

// `state`: `waiting` for the first chunk, or `running`.
labels!(StreamLabels { backend: String, state: &'static str });

/// A response's token count, by its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputTokens {
    /// Reported by the engine.
    Usage(u64),
    /// Number of stream events, if the engine reported no count; off by one or two for engines that send one token per
    /// event.
    Events(u64),
}

impl OutputTokens {
    pub(crate) fn count(self) -> u64 {
        match self {
            Self::Usage(tokens) | Self::Events(tokens) => tokens,
        }
    }
}

/// The tokens that the model computed for a request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Generated {
    /// Length of the prompt, if it was computed.
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) output_tokens: Option<OutputTokens>,
    /// Time from the request's arrival to the first chunk of its stream.
    pub(crate) first_token: Option<Duration>,
}

fn request_seconds() -> Traced {
    Traced::new(TO_SECONDS.into_iter().chain(TO_MINUTES))
}

metrics! {
    pub(crate) struct AnswerMetrics {
        seconds: Family<AnswerLabels, Traced, fn() -> Traced> = Family::new_with_constructor(request_seconds),
            "request_seconds", "Time from request arrival to the end of the response";
        first_token: Family<AnswerLabels, Traced, fn() -> Traced> =
            Family::new_with_constructor(|| Traced::new(FIRST_TOKEN_SECONDS.into_iter())),
            "time_to_first_token_seconds", "Time from request arrival to the first chunk of the stream";
        inter_token: Histograms<AnswerLabels> = Family::new_with_constructor(|| Histogram::new(INTER_TOKEN_SECONDS)),
            "inter_token_seconds",
            "Mean inter-token latency after a stream's first token, observed once per complete stream";
        prompt_tokens: Family<AnswerLabels, Counter>,
            "prompt_tokens",
            "Prompt tokens computed; estimated from the prompt's length if it was not tokenized";
        output_tokens: Family<OutputLabels, Counter>,
            "output_tokens", "Tokens generated, as reported in the engine's usage or else counted as stream events";
        streams: Family<StreamLabels, Gauge>,
            "streams", "Streams in flight: waiting for their first chunk, or running";
    }
}

impl AnswerMetrics {
    /// Sets the number of a backend's streams: those waiting for their first chunk, and those running.
    pub(crate) fn streams(&self, backend: &str, waiting: u64, running: u64) {
        for (state, streams) in [("waiting", waiting), ("running", running)] {
            let gauge = self.streams.get_or_create_owned(&StreamLabels { backend: backend.to_owned(), state });
            gauge.set(i64::try_from(streams).unwrap_or(i64::MAX));
        }
    }

    /// Removes the gauges of a departed backend; its counters remain.
    pub(super) fn forget(&self, backend: &str) {
        for state in ["waiting", "running"] {
            self.streams.remove(&StreamLabels { backend: backend.to_owned(), state });
        }
    }

    /// Returns the counters for responses to requests like this one.
    pub(super) fn learn(&self, done: &Done<'_>) -> KnownAnswers {
        let route = done.route.map_or(OTHER, Route::name);
        let (backend, model) = (done.backend.to_owned(), done.model.to_owned());
        let labels = AnswerLabels { backend, model, route };
        let output = |counted| {
            let AnswerLabels { backend, model, route } = labels.clone();
            self.output_tokens.get_or_create_owned(&OutputLabels { backend, model, route, counted })
        };
        let generates = done.backend != NONE && done.route.is_some_and(Route::generates);
        KnownAnswers {
            model: done.model.to_owned(),
            route: done.route,
            seconds: self.seconds.get_or_create_owned(&labels),
            generation: generates.then(|| KnownGeneration {
                first_token: self.first_token.get_or_create_owned(&labels),
                inter_token: self.inter_token.get_or_create_owned(&labels),
                prompt_tokens: self.prompt_tokens.get_or_create_owned(&labels),
                by_usage: output("usage"),
                by_events: output("events"),
            }),
        }
    }
}

/// Counters for one backend, model and route.
#[derive(Clone)]
pub(super) struct KnownAnswers {
    model: String,
    route: Option<Route>,
    seconds: Traced,
    /// Set on routes that generate tokens.
    generation: Option<KnownGeneration>,
}

#[derive(Clone)]
struct KnownGeneration {
    first_token: Traced,
    inter_token: Histogram,
    prompt_tokens: Counter,
    by_usage: Counter,
    by_events: Counter,
}

impl KnownAnswers {
    pub(super) fn is_for(&self, done: &Done<'_>) -> bool {
        self.route == done.route && self.model == done.model
    }

    pub(super) fn count(&self, done: &Done<'_>) {
        let exemplar = || done.trace.map(|trace| TraceLabels { trace_id: format!("{trace:032x}") });
        self.seconds.observe(done.took.as_secs_f64(), exemplar(), None);
        let Some(generation) = &self.generation else { return };
        let Generated { prompt_tokens, output_tokens, first_token } = done.generated;
        generation.prompt_tokens.inc_by(prompt_tokens.unwrap_or(0));
        match output_tokens {
            Some(OutputTokens::Usage(tokens)) => drop(generation.by_usage.inc_by(tokens)),
            Some(OutputTokens::Events(tokens)) => drop(generation.by_events.inc_by(tokens)),
            None => {}
        }
        let Some(first) = first_token else { return };
        generation.first_token.observe(first.as_secs_f64(), exemplar(), None);
        let tokens = output_tokens.map_or(0, OutputTokens::count);
        // A broken stream ends with a silence that is not a gap between tokens.
        if tokens > 1 && done.code < 300 {
            let rest = done.took.saturating_sub(first).as_secs_f64();
            generation.inter_token.observe(rest / (tokens - 1) as f64);
        }
    }
}
