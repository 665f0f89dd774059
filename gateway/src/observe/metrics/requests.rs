//! Counts requests by backend, rank, policy and status, and observes their responses.
//!
//! A metric family allocates its labels and takes a lock on every lookup. Here the counters used so far are indexed by
//! values that a request already has.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::StatusCode;
use prometheus_client::registry::Registry;
use semmoe_engines::Route;
use semmoe_tables::RankId;

use super::answers::{AnswerMetrics, Generated, KnownAnswers};
use super::labels::{Counter, Family, rank_label};

/// Status of a request whose client disconnected before the end, as in nginx.
pub(crate) const CLIENT_CLOSED: u16 = 499;
/// The label of a request without a backend, rank or policy.
pub(crate) const NONE: &str = "none";
/// The route label of requests to paths that the gateway does not serve.
pub(super) const OTHER: &str = "other";

// Labels of `semmoe_requests_total`.
labels!(RequestLabels { backend: String, model: String, rank: String, policy: &'static str, code: String });

/// Returns the status to count. An engine may return any of 900 statuses, each of which would add a series per rank, so
/// only registered ones are counted individually, and others by their first digit.
fn counted(code: u16) -> u16 {
    let named = StatusCode::from_u16(code).is_ok_and(|status| status.canonical_reason().is_some());
    if named || code == CLIENT_CLOSED { code } else { code / 100 }
}

/// Formats a counted status as a label.
fn code_label(counted: u16) -> String {
    if counted < 100 { format!("{counted}xx") } else { counted.to_string() }
}

/// Where a request ran, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The request was not sent.
    Nowhere,
    /// The engine chose the rank.
    Any,
    /// The rank that the request was pinned to.
    Rank(RankId),
}

impl Place {
    /// Returns the label, which the access log also uses.
    pub(crate) fn label(self) -> String {
        match self {
            Self::Nowhere => NONE.to_owned(),
            Self::Any => rank_label(None),
            Self::Rank(rank) => rank_label(Some(rank.get())),
        }
    }
}

/// A finished request.
#[derive(Clone, Copy)]
pub(crate) struct Done<'a> {
    /// The backend's name, or [`NONE`]; likewise for the model and the policy. The model has its configured name,
    /// whichever name the request used.
    pub(crate) backend: &'a str,
    pub(crate) model: &'a str,
    /// The route; `None` for paths that the gateway does not serve.
    pub(crate) route: Option<Route>,
    pub(crate) place: Place,
    pub(crate) policy: &'static str,
    pub(crate) code: u16,
    pub(crate) took: Duration,
    /// Trace id, if the request is traced.
    pub(crate) trace: Option<u128>,
    pub(crate) generated: Generated,
}

#[derive(Default)]
pub(crate) struct RequestMetrics {
    requests: Family<RequestLabels, Counter>,
    pub(crate) answers: AnswerMetrics,
    known: ArcSwap<HashMap<String, OfBackend>>,
}

/// One backend's counters.
#[derive(Clone, Default)]
struct OfBackend {
    answers: Vec<KnownAnswers>,
    counters: Vec<Known>,
}

#[derive(Clone)]
struct Known {
    model: String,
    place: Place,
    policy: &'static str,
    code: u16,
    requests: Counter,
}

impl RequestMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("requests", "Requests, by backend, model, rank, policy and status", self.requests.clone());
        self.answers.register(registry);
    }

    /// Counts one request.
    pub(crate) fn done(&self, done: &Done<'_>) {
        let code = counted(done.code);
        let known = self.known.load();
        let of_backend = known.get(done.backend);
        let is_this = |known: &&Known| {
            known.place == done.place && known.code == code && known.policy == done.policy && known.model == done.model
        };
        match of_backend.and_then(|of| of.counters.iter().find(is_this)) {
            Some(counter) => drop(counter.requests.inc()),
            None => self.learn(done, code),
        }
        match of_backend.and_then(|of| of.answers.iter().find(|answers| answers.is_for(done))) {
            Some(answers) => answers.count(done),
            None => {
                let answers = self.answers.learn(done);
                answers.count(done);
                self.remember(done.backend, |of| of.answers.push(answers.clone()));
            }
        }
    }

    /// Counts the first request of its kind and caches its counters.
    fn learn(&self, done: &Done<'_>, code: u16) {
        let Done { backend, place, policy, .. } = *done;
        let (model, rank, code_label) = (done.model.to_owned(), place.label(), code_label(code));
        let labels =
            RequestLabels { backend: backend.to_owned(), model: model.clone(), rank, policy, code: code_label };
        let requests = self.requests.get_or_create_owned(&labels);
        requests.inc();
        let counter = Known { model, place, policy, code, requests };
        self.remember(backend, |of| of.counters.push(counter.clone()));
    }

    /// Caches a counter. Another thread may have cached it already; the counter is the same.
    fn remember(&self, backend: &str, add: impl Fn(&mut OfBackend)) {
        self.known.rcu(|known| {
            let mut known = HashMap::clone(known);
            add(known.entry(backend.to_owned()).or_default());
            Arc::new(known)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::metrics::answers::OutputTokens;

    #[test]
    fn engines_cannot_make_labels() {
        let labels = |code: u16| code_label(counted(code));
        assert_eq!([200, 404, 499, 502].map(labels), ["200", "404", "499", "502"]);
        assert_eq!([299, 477, 599, 600, 999].map(labels), ["2xx", "4xx", "5xx", "6xx", "9xx"]);
        let all: std::collections::HashSet<String> = (100..1000).map(labels).collect();
        assert!(all.len() < 80, "{} labels", all.len());
    }

    fn done(backend: &str) -> Done<'_> {
        Done {
            backend,
            model: "m",
            route: Some(Route::Chat),
            place: Place::Any,
            policy: "affinity",
            code: 200,
            took: Duration::from_millis(1),
            trace: None,
            generated: Generated::default(),
        }
    }

    fn encoded(metrics: &RequestMetrics) -> String {
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn tokens_and_their_times_are_counted_where_a_model_ran() {
        let metrics = RequestMetrics::default();
        let generated = |output_tokens| Generated {
            prompt_tokens: Some(10),
            output_tokens: Some(output_tokens),
            first_token: Some(Duration::from_millis(200)),
        };
        let took = Duration::from_secs(1);
        metrics.done(&Done { took, generated: generated(OutputTokens::Usage(5)), ..done("a") });
        metrics.done(&Done { took, code: 502, generated: generated(OutputTokens::Events(3)), ..done("a") });
        metrics.done(&Done { took, generated: generated(OutputTokens::Events(1)), ..done("a") });
        metrics.done(&Done { route: Some(Route::Embeddings), ..done("a") });
        metrics.done(&Done { model: NONE, ..done(NONE) });
        metrics.done(&Done { trace: Some(0xabc), route: Some(Route::Embeddings), ..done("traced") });
        let text = encoded(&metrics);
        let trace = text.lines().find_map(|line| line.split_once(" # {trace_id=\"")).unwrap();
        assert_eq!(trace.1, format!("{:032x}\"}} 0.001", 0xabc));
        assert!(trace.0.starts_with("request_seconds_bucket") && trace.0.contains("traced"), "{trace:?}");
        let chat = r#"backend="a",model="m",route="/v1/chat/completions""#;
        for line in [
            format!("time_to_first_token_seconds_sum{{{chat}}} 0.6000000000000001"),
            // (1 - 0.2) s over 4 gaps, from the only complete stream that has any.
            format!("inter_token_seconds_sum{{{chat}}} 0.2"),
            format!("inter_token_seconds_count{{{chat}}} 1"),
            format!("prompt_tokens_total{{{chat}}} 30"),
            format!("output_tokens_total{{{chat},counted=\"usage\"}} 5"),
            format!("output_tokens_total{{{chat},counted=\"events\"}} 4"),
            r#"request_seconds_count{backend="a",model="m",route="/v1/embeddings"} 1"#.to_owned(),
            r#"request_seconds_count{backend="none",model="none",route="/v1/chat/completions"} 1"#.to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let first_tokens = text.lines().filter(|line| line.starts_with("time_to_first_token_seconds_count"));
        assert_eq!(first_tokens.count(), 1, "{text}");
    }

    #[test]
    fn every_request_is_counted_once_whoever_learns_its_labels() {
        let metrics = RequestMetrics::default();
        let places = [Place::Nowhere, Place::Any, Place::Rank(RankId::new(0)), Place::Rank(RankId::new(7))];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for number in 0..400usize {
                        let backend = ["a", "b"][number % 2];
                        let code = if number % 8 < 4 { 200 } else { 502 };
                        let place = places[number / 8 % 4];
                        metrics.done(&Done { place, code, ..done(backend) });
                    }
                });
            }
        });
        let text = encoded(&metrics);
        for backend in ["a", "b"] {
            for rank in ["none", "any", "0", "7"] {
                for code in [200, 502] {
                    let labels =
                        format!(r#"{{backend="{backend}",model="m",rank="{rank}",policy="affinity",code="{code}"}}"#);
                    let line = text.lines().find(|line| line.contains(&labels)).unwrap();
                    // 1,600 requests over two backends, four places and two codes, spread as evenly as possible.
                    let count: u64 = line.rsplit(' ').next().unwrap().parse().unwrap();
                    assert!([96, 104].contains(&count), "{line}");
                }
            }
            assert!(
                text.contains(&format!(
                    "request_seconds_count{{backend=\"{backend}\",model=\"m\",route=\"/v1/chat/completions\"}} 800"
                )),
                "{text}"
            );
        }
    }
}
