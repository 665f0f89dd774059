//! The gateway's metrics. Their names are fixed by the design; numeric labels in code become text here.
//!
//! A request's `code` is the status sent, with two exceptions: 499, the client disconnected before the end; 502, the
//! backend broke off after a 2xx head was relayed. `rank` is "any" if the engine chose. `semmoe_predicted_lar` is a
//! histogram of the expected local share on the chosen rank, over all requests that were scored with evidence and
//! pinned, by the policy that chose: each request counts once, whatever its length. The predicted local activation rate
//! covers all of their activations: `semmoe_predicted_local_activations_total` divided by
//! `semmoe_predicted_activations_total`. The `semmoe_shadow_*` gauges are set on every scrape.

/// Declares a group of metrics, each with its type, its initial value unless default, its name and its help text.
macro_rules! metrics {
    ($(#[$meta:meta])* $vis:vis struct $group:ident {
        $($field:ident: $kind:ty $(= $new:expr)?, $name:literal, $help:literal;)*
    }) => {
        $(#[$meta])*
        $vis struct $group {
            $($field: $kind,)*
        }

        impl Default for $group {
            fn default() -> Self {
                Self { $($field: metrics!(@new $($new)?),)* }
            }
        }

        impl $group {
            pub(super) fn register(&self, registry: &mut prometheus_client::registry::Registry) {
                $(registry.register($name, $help, self.$field.clone());)*
            }
        }
    };
    (@new) => { Default::default() };
    (@new $new:expr) => { $new };
}

/// Declares a metric family's labels.
macro_rules! labels {
    ($name:ident { $($field:ident: $kind:ty),* }) => {
        #[derive(Clone, Debug, Hash, PartialEq, Eq, prometheus_client::encoding::EncodeLabelSet)]
        pub(crate) struct $name {
            $(pub(crate) $field: $kind,)*
        }
    };
}

mod answers;
mod faults;
mod labels;
mod live;
mod memory;
mod operation;
mod pins;
mod process;
mod prompts;
mod requests;
mod shadow;
mod spans;
mod switching;
mod tables;
mod text;
mod trust;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::registry::Registry;
use semmoe_text::SegmentCache;

pub(crate) use answers::{Generated, OutputTokens};
use faults::FaultMetrics;
pub(crate) use labels::rank_label;
use labels::{
    BackendLabels, Counter, Family, Gauge, Histogram, Histograms, ModelLabels, RealCounter, ReasonLabels, of_backend,
    shares,
};
pub(crate) use live::LiveMetrics;
pub(crate) use memory::MemoryMetrics;
use operation::OperationMetrics;
use pins::PinMetrics;
use process::ProcessMetrics;
use prompts::PromptMetrics;
use requests::RequestMetrics;
pub(crate) use requests::{CLIENT_CLOSED, Done, NONE, Place};
use shadow::ShadowMetrics;
pub(crate) use spans::SpanMetrics;
pub(crate) use switching::SwitchMetrics;
use tables::TablesMetrics;
pub(crate) use tables::Waits;
pub(crate) use text::TextFormat;
use trust::TrustMetrics;

/// Buckets for the gateway's own time per request: scoring takes up to a few milliseconds, and more than 0.1 s
/// indicates a fault.
const OVERHEAD_SECONDS: [f64; 13] = [5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

labels!(PolicyLabels { policy: &'static str });

// `arm`: `canary` or `baseline`.
labels!(CanaryLabels { model: String, arm: &'static str });

// One rank of a backend.
labels!(RankLabels { backend: String, rank: String });

labels!(RetryLabels { cause: &'static str, outcome: &'static str });

metrics! {
    /// Routing metrics, and metrics without a group of their own.
    struct RoutingMetrics {
        overhead_seconds: Histogram = Histogram::new(OVERHEAD_SECONDS),
            "gateway_overhead_seconds",
            "Time from receiving the body to dispatching the request: scoring, choosing, pinning";
        inflight: Family<RankLabels, Gauge>, "rank_inflight", "Requests in flight";
        predicted_lar: Histograms<PolicyLabels> = Family::new_with_constructor(shares),
            "predicted_lar",
            "Expected local share of each scored and pinned request on its rank, observed once regardless of length";
        predicted_local: Family<PolicyLabels, RealCounter>,
            "predicted_local_activations",
            "Prompt activations of scored and pinned requests that are expected to be local; as a share of predicted_activations, the predicted rate";
        predicted_all: Family<PolicyLabels, Counter>,
            "predicted_activations", "All prompt activations of scored and pinned requests";
        canary: Family<CanaryLabels, Counter>, "canary_requests", "Requests of a model with a canary, by arm";
        tables_generation: Gauge<u64, AtomicU64>,
            "tables_generation", "Generation of the reloadable state; incremented by every swap";
        score_failures: Family<ReasonLabels, Counter>,
            "score_failures", "Requests routed by load because they could not be scored";
        cache_hits: Family<ModelLabels, Counter>,
            "segment_cache_hits", "Texts between added tokens whose ids were reused, such as earlier chat turns";
        cache_misses: Family<ModelLabels, Counter>,
            "segment_cache_misses", "Texts between added tokens that were encoded";
        cache_bytes: Family<ModelLabels, Gauge>, "segment_cache_bytes", "Bytes held by the segment cache";
        template_unreadable: Family<ModelLabels, Gauge>,
            "chat_template_unreadable", "1 if the model's chat template cannot be used; an earlier one, or none, is used instead";
        backend_healthy: Family<BackendLabels, Gauge>, "backend_healthy", "1 if the backend receives requests";
        retries: Family<RetryLabels, Counter>,
            "retries",
            "Retryable failed attempts, by cause and by the retry's outcome or why there was none";
    }
}

/// One policy's metric handles, which bypass the families' locks.
#[derive(Clone)]
struct Predicted {
    policy: &'static str,
    share: Histogram,
    local: RealCounter,
    all: Counter,
}

impl Predicted {
    fn count(&self, share: f64, activations: u64) {
        self.share.observe(share);
        self.local.inc_by(share * activations as f64);
        self.all.inc_by(activations);
    }
}

/// All metrics of one gateway.
#[derive(Default)]
pub(crate) struct Metrics {
    registry: Registry,
    process: ProcessMetrics,
    pub(crate) requests: RequestMetrics,
    routing: RoutingMetrics,
    predicted: ArcSwap<Vec<Predicted>>,
    pub(crate) shadow: ShadowMetrics,
    pub(crate) tables: TablesMetrics,
    pub(crate) spans: SpanMetrics,
    pub(crate) pins: PinMetrics,
    pub(crate) prompts: PromptMetrics,
    pub(crate) live: LiveMetrics,
    pub(crate) trust: TrustMetrics,
    pub(crate) memory: MemoryMetrics,
    pub(crate) faults: FaultMetrics,
    pub(crate) switching: SwitchMetrics,
    pub(crate) operation: OperationMetrics,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut metrics = Self { registry: Registry::with_prefix("semmoe"), ..Self::default() };
        let registry = &mut metrics.registry;
        process::register_build(registry);
        metrics.requests.register(registry);
        metrics.routing.register(registry);
        metrics.shadow.register(registry);
        metrics.tables.register(registry);
        metrics.spans.register(registry);
        metrics.pins.register(registry);
        metrics.prompts.register(registry);
        metrics.live.register(registry);
        metrics.trust.register(registry);
        metrics.memory.register(registry);
        metrics.faults.register(registry);
        metrics.switching.register(registry);
        metrics.operation.register(registry);
        metrics
    }

    pub(crate) fn encode(&self, format: TextFormat) -> String {
        let mut text = String::new();
        // Writing into a String cannot fail.
        for registry in [Some(&self.registry), self.process.refreshed()].into_iter().flatten() {
            let _ = encode_registry(&mut text, registry);
        }
        let _ = encode_eof(&mut text);
        match format {
            TextFormat::OpenMetrics => text,
            TextFormat::Prometheus => text::older(&text),
        }
    }

    pub(crate) fn overhead(&self, took: Duration) {
        self.routing.overhead_seconds.observe(took.as_secs_f64());
    }

    /// Returns the gauge of a rank's requests in flight; `None`: requests whose rank the engine chooses.
    pub(crate) fn inflight(&self, backend: &str, rank: Option<u16>) -> Gauge {
        self.routing.inflight.get_or_create_owned(&RankLabels { backend: backend.to_owned(), rank: rank_label(rank) })
    }

    /// Records a request whose prompt has `activations`, of which the fraction `share` is predicted to be local.
    pub(crate) fn predicted_lar(&self, policy: &'static str, share: f64, activations: u64) {
        let known = self.predicted.load();
        match known.iter().find(|of| of.policy == policy) {
            Some(predicted) => predicted.count(share, activations),
            None => self.learn_predicted(policy).count(share, activations),
        }
    }

    fn learn_predicted(&self, policy: &'static str) -> Predicted {
        let (labels, routing) = (PolicyLabels { policy }, &self.routing);
        let predicted = Predicted {
            policy,
            share: routing.predicted_lar.get_or_create_owned(&labels),
            local: routing.predicted_local.get_or_create_owned(&labels),
            all: routing.predicted_all.get_or_create_owned(&labels),
        };
        self.predicted.rcu(|known| known.iter().chain([&predicted]).cloned().collect::<Vec<_>>());
        predicted
    }

    /// Returns the request counter for one arm of a canary.
    pub(crate) fn canary(&self, model: &str, arm: &'static str) -> Counter {
        self.routing.canary.get_or_create_owned(&CanaryLabels { model: model.to_owned(), arm })
    }

    pub(crate) fn generation(&self, generation: u64) {
        self.routing.tables_generation.set(generation);
    }

    pub(crate) fn score_failure(&self, reason: &'static str) {
        self.routing.score_failures.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Sets the state of a model's segment cache, and whether its chat template is unusable.
    pub(crate) fn text(&self, model: &str, cache: &SegmentCache, is_unreadable: bool) {
        let labels = ModelLabels { model: model.to_owned() };
        let RoutingMetrics { cache_hits, cache_misses, cache_bytes, template_unreadable, .. } = &self.routing;
        template_unreadable.get_or_create(&labels).set(i64::from(is_unreadable));
        cache_hits.get_or_create(&labels).inner().store(cache.hits, Ordering::Relaxed);
        cache_misses.get_or_create(&labels).inner().store(cache.misses, Ordering::Relaxed);
        cache_bytes.get_or_create(&labels).set(cache.bytes as i64);
    }

    pub(crate) fn backend_healthy(&self, backend: &str, healthy: bool) {
        self.routing.backend_healthy.get_or_create(&of_backend(backend)).set(i64::from(healthy));
    }

    /// Counts a retry by its outcome, or by why it was not made (`no_...`).
    pub(crate) fn retry(&self, cause: &'static str, outcome: &'static str) {
        self.routing.retries.get_or_create(&RetryLabels { cause, outcome }).inc();
    }

    /// Removes the gauges of a departed backend. Returns whether its requests have ended; until then they are still
    /// counted. Its counters remain.
    pub(crate) fn forget_backend(&self, backend: &str, ranks: u16) -> bool {
        let labels = of_backend(backend);
        self.routing.backend_healthy.remove(&labels);
        self.pins.forget(&labels);
        self.prompts.forget(backend);
        self.faults.forget(&labels);
        self.requests.answers.forget(backend);
        self.forget_inflight(backend, || (0..ranks).map(Some).chain([None]))
    }

    /// Removes the gauges of ranks that a backend lost. Returns whether their requests have ended; until then they are
    /// still counted.
    pub(crate) fn forget_ranks(&self, backend: &str, ranks: Range<u16>) -> bool {
        self.forget_inflight(backend, || ranks.clone().map(Some))
    }

    fn forget_inflight<R: Iterator<Item = Option<u16>>>(&self, backend: &str, ranks: impl Fn() -> R) -> bool {
        let ended = ranks().all(|rank| self.inflight(backend, rank).get() == 0);
        for rank in ranks().filter(|_| ended) {
            self.routing.inflight.remove(&RankLabels { backend: backend.to_owned(), rank: rank_label(rank) });
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use semmoe_routing::{Report, ReportSide};

    use super::*;

    #[test]
    fn names_are_those_of_the_design() {
        let metrics = Metrics::new();
        metrics.requests.done(&Done {
            backend: "a",
            model: "m",
            route: Some(semmoe_engines::Route::Chat),
            place: Place::Rank(semmoe_tables::RankId::new(1)),
            policy: "affinity",
            code: 200,
            took: Duration::from_millis(3),
            trace: None,
            generated: Generated::default(),
        });
        metrics.inflight("a", Some(1)).inc();
        metrics.predicted_lar("affinity", 0.5, 100);
        metrics.predicted_lar("affinity", 0.25, 300);
        metrics.canary("m", "baseline").inc();
        let side = |share| ReportSide { local_share: Some(share), cached_share: None, tokens_max_over_mean: 1.5 };
        let report =
            Report { requests: 7, same_rank: 2, tokens: 70, scored_tokens: 70, acting: side(0.25), watched: side(0.5) };
        metrics.shadow.set("m", "least_load", "affinity", &report);
        metrics.generation(2);
        metrics.tables.reload("ok");
        metrics.score_failure("template");
        let text = metrics.encode(TextFormat::OpenMetrics);
        for line in [
            r#"semmoe_requests_total{backend="a",model="m",rank="1",policy="affinity",code="200"} 1"#,
            r#"semmoe_request_seconds_count{backend="a",model="m",route="/v1/chat/completions"} 1"#,
            "semmoe_gateway_overhead_seconds_count 0",
            r#"semmoe_rank_inflight{backend="a",rank="1"} 1"#,
            r#"semmoe_predicted_lar_sum{policy="affinity"} 0.75"#,
            r#"semmoe_predicted_local_activations_total{policy="affinity"} 125.0"#,
            r#"semmoe_predicted_activations_total{policy="affinity"} 400"#,
            r#"semmoe_canary_requests_total{model="m",arm="baseline"} 1"#,
            r#"semmoe_shadow_requests{model="m",policy="affinity"} 7"#,
            r#"semmoe_shadow_local_share{model="m",policy="least_load"} 0.25"#,
            r#"semmoe_shadow_local_share{model="m",policy="affinity"} 0.5"#,
            r#"semmoe_shadow_tokens_max_over_mean{model="m",policy="affinity"} 1.5"#,
            "semmoe_tables_generation 2",
            r#"semmoe_table_reloads_total{outcome="ok"} 1"#,
            r#"semmoe_score_failures_total{reason="template"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
