//! Metrics of reloads and discovery.

use super::labels::{Counter, Family, Gauge, OutcomeLabels};

labels!(AnswerLabels { source: String, outcome: &'static str });

labels!(SourceLabels { source: String });

metrics! {
    /// Metrics of changes made by an operator.
    pub(crate) struct OperationMetrics {
        config_reloads: Family<OutcomeLabels, Counter>,
            "config_reloads",
            "Configuration reloads, by outcome: ok, invalid (the file), refused (something that it names), failed";
        config_stale: Gauge,
            "config_stale", "1 if the last reload failed, so that the file differs from the running configuration";
        config_needs_restart: Gauge,
            "config_needs_restart",
            "Keys that the last successful reload changed and that only take effect after a restart";
        discovery_answers: Family<AnswerLabels, Counter>,
            "discovery_answers",
            "Discovery lookups, by outcome: ok, empty, failed (the latter two change nothing), too_many, incomplete";
        discovery_backends: Family<SourceLabels, Gauge>, "discovery_backends", "Discovered backends in use";
        discovery_stale: Family<SourceLabels, Gauge>,
            "discovery_stale",
            "1 while a source's last lookup has failed or was empty, so that its previous backends stay in use";
    }
}

impl OperationMetrics {
    pub(crate) fn config_reloaded(&self, outcome: &'static str) {
        self.config_reloads.get_or_create(&OutcomeLabels { outcome }).inc();
        self.config_stale.set(i64::from(outcome != "ok"));
    }

    pub(crate) fn discovery_answer(&self, source: &str, outcome: &'static str, stale: bool) {
        self.discovery_answers.get_or_create(&AnswerLabels { source: source.to_owned(), outcome }).inc();
        self.discovery_stale.get_or_create(&SourceLabels { source: source.to_owned() }).set(i64::from(stale));
    }

    pub(crate) fn discovered(&self, source: &str, backends: usize) {
        self.discovery_backends.get_or_create(&SourceLabels { source: source.to_owned() }).set(backends as i64);
    }

    /// Removes the gauges of a discovery source that was removed.
    pub(crate) fn forget_source(&self, source: &str) {
        let labels = SourceLabels { source: source.to_owned() };
        self.discovery_backends.remove(&labels);
        self.discovery_stale.remove(&labels);
    }

    pub(crate) fn needs_restart(&self, keys: usize) {
        self.config_needs_restart.set(keys as i64);
    }
}
