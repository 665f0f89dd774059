//! Counters of sampled requests.

use super::labels::{
    BackendLabels, Counter, Family, Gauge, Histograms, ModelLabels, OutcomeLabels, RealCounter, of_backend, shares,
};

labels!(SampleLabels { backend: String, outcome: &'static str });

// `phase`: `prompt` or `decode`.
// `place`: `local` or `remote`.
labels!(PlaceLabels { backend: String, phase: &'static str, place: &'static str });

metrics! {
    /// Metrics of the live LAR and the rolling profiles.
    #[derive(Clone)]
    pub(crate) struct LiveMetrics {
        sampled: Family<SampleLabels, Counter>,
            "sampled_requests", "Sampled requests, for which the engine should return routed experts, by outcome";
        observed: Histograms<BackendLabels> = Family::new_with_constructor(shares),
            "observed_lar",
            "Local share of each sampled request's activations, observed once per request regardless of length";
        predicted: Histograms<BackendLabels> = Family::new_with_constructor(shares),
            "sampled_predicted_lar",
            "Local share that T predicts for each sampled request's tokens, observed once per request";
        predicted_local: Family<BackendLabels, RealCounter>,
            "sampled_predicted_local_activations",
            "Activations of sampled requests that T predicts to be local; as a share of sampled_predicted_activations, the predicted rate";
        predicted_all: Family<BackendLabels, Counter>,
            "sampled_predicted_activations", "All activations of sampled requests with a prediction";
        activations: Family<PlaceLabels, Counter>, "sampled_activations", "Activations of sampled requests";
        drift: Family<BackendLabels, Gauge>,
            "lar_drift", "1 if the predicted local share has exceeded the observed one for too long";
        refused: Family<BackendLabels, Gauge>,
            "sampling_refused", "1 if the engine rejects requests for routed experts and is therefore not sampled";
        tokens: Family<ModelLabels, Gauge>, "rolling_profile_tokens", "Tokens in the rolling profile";
        entries: Family<ModelLabels, Gauge>, "rolling_profile_entries", "Entries of the rolling profile";
        dropped: Family<ModelLabels, Counter>,
            "rolling_profile_dropped_tokens",
            "Tokens dropped from the rolling profile because it was full or because of their age";
        traces: Family<OutcomeLabels, Counter>,
            "sampled_trace_writes", "Trace writes for sampled requests, by outcome";
        writes: Family<OutcomeLabels, Counter>,
            "rolling_profile_writes", "Rolling profile writes, by outcome";
    }
}

impl LiveMetrics {
    pub(crate) fn sampled(&self, backend: &str, outcome: &'static str) {
        self.sampled.get_or_create(&SampleLabels { backend: backend.to_owned(), outcome }).inc();
    }

    /// Records one request's rates.
    pub(crate) fn rates(&self, backend: &str, activations: u64, observed: f64, predicted: Option<f64>) {
        let labels = of_backend(backend);
        self.observed.get_or_create(&labels).observe(observed);
        if let Some(predicted) = predicted {
            self.predicted.get_or_create(&labels).observe(predicted);
            self.predicted_local.get_or_create(&labels).inc_by(predicted * activations as f64);
            self.predicted_all.get_or_create(&labels).inc_by(activations);
        }
    }

    /// Counts one request's activations in a phase.
    pub(crate) fn activations(&self, backend: &str, phase: &'static str, local: u64, remote: u64) {
        for (place, count) in [("local", local), ("remote", remote)] {
            self.activations.get_or_create(&PlaceLabels { backend: backend.to_owned(), phase, place }).inc_by(count);
        }
    }

    pub(crate) fn drift(&self, backend: &str, raised: bool) {
        self.drift.get_or_create(&of_backend(backend)).set(i64::from(raised));
    }

    pub(crate) fn refused(&self, backend: &str, refused: bool) {
        self.refused.get_or_create(&of_backend(backend)).set(i64::from(refused));
    }

    /// Sets the size of a model's rolling profile, and counts the tokens that it dropped since the last call.
    pub(crate) fn profile(&self, model: &str, tokens: u64, entries: usize, dropped: u64) {
        let labels = ModelLabels { model: model.to_owned() };
        self.tokens.get_or_create(&labels).set(i64::try_from(tokens).unwrap_or(i64::MAX));
        self.entries.get_or_create(&labels).set(i64::try_from(entries).unwrap_or(i64::MAX));
        self.dropped.get_or_create(&labels).inc_by(dropped);
    }

    pub(crate) fn trace_written(&self, outcome: &'static str) {
        self.traces.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub(crate) fn profile_written(&self, outcome: &'static str) {
        self.writes.get_or_create(&OutcomeLabels { outcome }).inc();
    }
}
