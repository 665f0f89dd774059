//! Requests by backend, rank, policy and status, and how long they took.
//!
//! A family makes strings of its labels and takes a lock for each look. Here every counter that was ever used is found again by what a
//! request knows anyway.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use semmoe_tables::RankId;

use super::{BackendLabels, rank_label};

/// The client went away before the end; nginx's code for it.
pub(crate) const CLIENT_CLOSED: u16 = 499;
/// In place of a backend, a rank or a policy where a request came to none.
pub(crate) const NONE: &str = "none";

/// Labels of `semmoe_requests_total`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    backend: String,
    rank: String,
    policy: &'static str,
    code: String,
}

/// The status as it is counted: an engine may answer with any of 900, of which each would be a line for each rank. Those that
/// have a name are themselves; of others the first digit counts.
fn counted(code: u16) -> u16 {
    let named = StatusCode::from_u16(code).is_ok_and(|status| status.canonical_reason().is_some());
    if named || code == CLIENT_CLOSED { code } else { code / 100 }
}

/// Such a status as a label.
fn code_label(counted: u16) -> String {
    if counted < 100 { format!("{counted}xx") } else { counted.to_string() }
}

/// Where a request ran, as far as anybody can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It was not sent.
    Nowhere,
    /// The engine chose.
    Any,
    /// A rank that it was pinned to.
    Rank(RankId),
}

impl Place {
    /// As it stands in labels and in the access log.
    pub(crate) fn label(self) -> String {
        match self {
            Self::Nowhere => NONE.to_owned(),
            Self::Any => rank_label(None),
            Self::Rank(rank) => rank_label(Some(rank.get())),
        }
    }
}

pub(crate) struct RequestMetrics {
    requests: Family<RequestLabels, Counter>,
    seconds: Family<BackendLabels, Histogram, fn() -> Histogram>,
    known: ArcSwap<HashMap<String, OfBackend>>,
}

/// What was counted for one backend.
#[derive(Clone)]
struct OfBackend {
    seconds: Histogram,
    counters: Vec<Known>,
}

#[derive(Clone)]
struct Known {
    place: Place,
    policy: &'static str,
    code: u16,
    requests: Counter,
}

impl Default for RequestMetrics {
    fn default() -> Self {
        // Seconds: 1 ms to 1000 s, a factor of about 2.
        let seconds: fn() -> Histogram = || Histogram::new(exponential_buckets(0.001, 2.0, 21));
        Self { requests: Family::default(), seconds: Family::new_with_constructor(seconds), known: ArcSwap::default() }
    }
}

impl RequestMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("requests", "Requests, by backend, rank, policy and status", self.requests.clone());
        registry.register("request_seconds", "From the body's arrival to the end of the answer", self.seconds.clone());
    }

    /// Counts one request.
    pub(crate) fn done(&self, backend: &str, place: Place, policy: &'static str, code: u16, took: Duration) {
        let code = counted(code);
        let known = self.known.load();
        let of_backend = known.get(backend);
        let is_this = |known: &&Known| known.place == place && known.code == code && known.policy == policy;
        match of_backend.and_then(|of| of.counters.iter().find(is_this).map(|known| (of, known))) {
            Some((of_backend, counter)) => {
                counter.requests.inc();
                of_backend.seconds.observe(took.as_secs_f64());
            }
            None => {
                let of_backend = self.learn(backend, place, policy, code);
                of_backend.seconds.observe(took.as_secs_f64());
            }
        }
    }

    /// Counts the first request of its kind, and remembers where.
    fn learn(&self, backend: &str, place: Place, policy: &'static str, code: u16) -> OfBackend {
        let labels = RequestLabels { backend: backend.to_owned(), rank: place.label(), policy, code: code_label(code) };
        let requests = self.requests.get_or_create_owned(&labels);
        requests.inc();
        let seconds = self.seconds.get_or_create_owned(&BackendLabels { backend: backend.to_owned() });
        let counter = Known { place, policy, code, requests };
        self.known.rcu(|known| {
            let mut known = HashMap::clone(known);
            let of_backend = known
                .entry(backend.to_owned())
                .or_insert_with(|| OfBackend { seconds: seconds.clone(), counters: Vec::new() });
            // Another thread may have learned the same; the counter is one.
            of_backend.counters.push(counter.clone());
            Arc::new(known)
        });
        OfBackend { seconds, counters: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_cannot_make_labels() {
        let labels = |code: u16| code_label(counted(code));
        assert_eq!([200, 404, 499, 502].map(labels), ["200", "404", "499", "502"]);
        assert_eq!([299, 477, 599, 600, 999].map(labels), ["2xx", "4xx", "5xx", "6xx", "9xx"]);
        let all: std::collections::HashSet<String> = (100..1000).map(labels).collect();
        assert!(all.len() < 80, "{} labels", all.len());
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
                        metrics.done(backend, places[number / 8 % 4], "affinity", code, Duration::from_millis(1));
                    }
                });
            }
        });
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for backend in ["a", "b"] {
            for rank in ["none", "any", "0", "7"] {
                for code in [200, 502] {
                    let labels = format!(r#"{{backend="{backend}",rank="{rank}",policy="affinity",code="{code}"}}"#);
                    let line = text.lines().find(|line| line.contains(&labels)).unwrap();
                    // 1,600 requests: two backends, four places, and two codes of the same number each, as near as it goes.
                    let count: u64 = line.rsplit(' ').next().unwrap().parse().unwrap();
                    assert!([96, 104].contains(&count), "{line}");
                }
            }
            assert!(text.contains(&format!("request_seconds_count{{backend=\"{backend}\"}} 800")), "{text}");
        }
    }
}
