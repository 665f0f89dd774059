//! What is counted of keys and certificates.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FailureLabels {
    /// `missing`, `wrong` or `model`.
    reason: &'static str,
}

#[derive(Default)]
pub(crate) struct TrustMetrics {
    auth_failures: Family<FailureLabels, Counter>,
}

impl TrustMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "auth_failures",
            "Requests of the data plane refused for want of a key, for a wrong one, or for a model that the key may not use",
            self.auth_failures.clone(),
        );
    }

    pub(crate) fn auth_failure(&self, reason: &'static str) {
        self.auth_failures.get_or_create(&FailureLabels { reason }).inc();
    }
}
