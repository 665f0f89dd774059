//! Breakers, drained backends, queues.

use super::labels::{BackendLabels, Counter, Family, Gauge, Histogram, Histograms, ModelLabels, of_backend};

/// Buckets up to the longest wait that is commonly configured.
const QUEUE_SECONDS: [f64; 12] = [0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

// `to`: the new state, or `spared` if the breaker stayed or became closed because no other backend could serve.
labels!(BreakerLabels { backend: String, to: &'static str });

labels!(ShedLabels { model: String, reason: &'static str });

// `kind`: `engine_dead`, `abort`, `engine_error`.
labels!(FailureLabels { backend: String, kind: &'static str });

// `to`: `suspected`, `recovered`.
labels!(SilenceLabels { backend: String, to: &'static str });

metrics! {
    /// Metrics of faults.
    pub(crate) struct FaultMetrics {
        breaker_state: Family<BackendLabels, Gauge>,
            "breaker_state", "Circuit breaker state: 0 closed, 1 half-open, 2 open";
        breaker_changes: Family<BreakerLabels, Counter>, "breaker_changes", "Circuit breaker state changes";
        queue_depth: Family<ModelLabels, Gauge>, "queue_depth", "Requests waiting for a rank or a backend";
        queue_seconds: Histograms<ModelLabels> = Family::new_with_constructor(|| Histogram::new(QUEUE_SECONDS)),
            "queue_seconds", "Time that requests waited in the queue";
        shed: Family<ShedLabels, Counter>, "shed", "Requests rejected because there was no room";
        strays: Family<BackendLabels, Counter>,
            "stray_answers", "Connections closed because the backend sent bytes that belong to no response";
        engine_failures: Family<FailureLabels, Counter>,
            "engine_failures", "Responses in which the engine reports a failure, by kind";
        silences: Family<SilenceLabels, Counter>,
            "backend_silences",
            "How often streams fell silent while the scheduler answered no probe, and how often it recovered";
        draining: Family<BackendLabels, Gauge>,
            "backend_draining", "1 while the backend is draining and receives no new requests";
    }
}

impl FaultMetrics {
    /// Returns the metrics for a model's queue depth and queue wait time.
    pub(crate) fn queue(&self, model: &str) -> (Gauge, Histogram) {
        let labels = ModelLabels { model: model.to_owned() };
        (self.queue_depth.get_or_create_owned(&labels), self.queue_seconds.get_or_create_owned(&labels))
    }

    /// Counts a request that was rejected for lack of room.
    pub(crate) fn shed(&self, model: &str, reason: &'static str) {
        self.shed.get_or_create(&ShedLabels { model: model.to_owned(), reason }).inc();
    }

    /// Counts connections closed because a backend sent unsolicited data.
    pub(crate) fn strays(&self, backend: &str, connections: u64) {
        self.strays.get_or_create(&of_backend(backend)).inc_by(connections);
    }

    /// Counts a response in which the engine reported a failure.
    pub(crate) fn engine_failed(&self, backend: &str, kind: &'static str) {
        self.engine_failures.get_or_create(&FailureLabels { backend: backend.to_owned(), kind }).inc();
    }

    /// Counts a backend whose scheduler looks dead, or proved to be alive.
    pub(crate) fn silence(&self, backend: &str, to: &'static str) {
        self.silences.get_or_create(&SilenceLabels { backend: backend.to_owned(), to }).inc();
    }

    /// Sets a breaker's state, numbered as in the metric's help text; returns the previous one.
    pub(crate) fn breaker(&self, backend: &str, state: i64) -> i64 {
        self.breaker_state.get_or_create(&of_backend(backend)).set(state)
    }

    pub(crate) fn breaker_changed(&self, backend: &str, to: &'static str) {
        self.breaker_changes.get_or_create(&BreakerLabels { backend: backend.to_owned(), to }).inc();
    }

    /// Removes the gauges of a departed backend.
    pub(super) fn forget(&self, labels: &BackendLabels) {
        self.breaker_state.remove(labels);
        self.draining.remove(labels);
    }

    pub(crate) fn draining(&self, backend: &str, draining: bool) {
        self.draining.get_or_create(&of_backend(backend)).set(i64::from(draining));
    }
}
