//! Breakers, drained backends, queues.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::BackendLabels;
use crate::breaker::State;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct BreakerLabels {
    backend: String,
    /// The new state, or `spared` where it stayed closed, or closed, as nobody else could serve.
    to: &'static str,
}

/// What is counted of faults.
#[derive(Default)]
pub(crate) struct FaultMetrics {
    breaker_state: Family<BackendLabels, Gauge>,
    breaker_changes: Family<BreakerLabels, Counter>,
    draining: Family<BackendLabels, Gauge>,
}

impl FaultMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("breaker_state", "0 closed, 1 half open, 2 open", self.breaker_state.clone());
        registry.register("breaker_changes", "Changes of breakers", self.breaker_changes.clone());
        registry.register("backend_draining", "1 while no new requests are placed", self.draining.clone());
    }

    /// Sets the state; returns that before.
    pub(crate) fn breaker(&self, backend: &str, state: State) -> State {
        let number = |state| match state {
            State::Closed => 0,
            State::HalfOpen => 1,
            State::Open => 2,
        };
        let before =
            self.breaker_state.get_or_create(&BackendLabels { backend: backend.to_owned() }).set(number(state));
        [State::Closed, State::HalfOpen, State::Open]
            .into_iter()
            .find(|state| number(*state) == before)
            .unwrap_or(state)
    }

    pub(crate) fn breaker_changed(&self, backend: &str, to: &'static str) {
        self.breaker_changes.get_or_create(&BreakerLabels { backend: backend.to_owned(), to }).inc();
    }

    pub(crate) fn draining(&self, backend: &str, draining: bool) {
        self.draining.get_or_create(&BackendLabels { backend: backend.to_owned() }).set(i64::from(draining));
    }
}
