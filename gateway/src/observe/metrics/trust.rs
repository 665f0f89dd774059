//! Metrics of API keys, TLS handshakes, certificates and connections.

use super::labels::{Counter, Family, Gauge, OutcomeLabels};

// `reason`: `missing`, `wrong` or `model`.
labels!(FailureLabels { reason: &'static str });

metrics! {
    pub(crate) struct TrustMetrics {
        auth_failures: Family<FailureLabels, Counter>,
            "auth_failures",
            "Data plane requests rejected for a missing or wrong key, or for a model that the key may not use";
        handshakes: Family<OutcomeLabels, Counter>, "tls_handshakes", "TLS handshakes with clients, by outcome";
        credential_reloads: Family<OutcomeLabels, Counter>,
            "credential_reloads", "Reloads of changed certificate or key files, by outcome";
        connections_refused: Counter,
            "connections_refused", "Connections closed because their client address had too many";
        connections_displaced: Counter,
            "connections_displaced",
            "Connections closed while idle, to make room for new ones";
        open_connections: Gauge,
            "open_connections",
            "Open client connections to all listeners, at most limits.connections of them to the data plane";
        open_streams: Gauge, "open_streams", "Requests running over HTTP/2, at most limits.open_streams";
        streams_refused: Counter,
            "streams_refused", "HTTP/2 requests rejected because limits.open_streams were already running";
    }
}

impl TrustMetrics {
    /// `ok`, `failed` or `timeout`.
    pub(crate) fn handshake(&self, outcome: &'static str) {
        self.handshakes.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub(crate) fn credential_reload(&self, outcome: &'static str) {
        self.credential_reloads.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub(crate) fn connection_refused(&self) {
        self.connections_refused.inc();
    }

    pub(crate) fn connection_displaced(&self) {
        self.connections_displaced.inc();
    }

    /// Counts a connection as open until the guard is dropped.
    pub(crate) fn open_connection(&self) -> OpenConnection {
        self.open_connections.inc();
        OpenConnection(self.open_connections.clone())
    }

    /// Number of connections and streams currently open.
    pub(crate) fn open_exchanges(&self) -> usize {
        usize::try_from(self.open_connections.get() + self.open_streams.get()).unwrap_or(0)
    }

    /// Counts a request over HTTP/2, unless `limit` are already running. Each counted request must be passed to
    /// [`TrustMetrics::stream_ended`].
    pub(crate) fn stream_begins(&self, limit: u32) -> bool {
        let fits = self.open_streams.inc() < i64::from(limit);
        if !fits {
            self.open_streams.dec();
            self.streams_refused.inc();
        }
        fits
    }

    pub(crate) fn stream_ended(&self) {
        self.open_streams.dec();
    }

    pub(crate) fn auth_failure(&self, reason: &'static str) {
        self.auth_failures.get_or_create(&FailureLabels { reason }).inc();
    }
}

/// A client connection, counted as open until it is dropped.
pub(crate) struct OpenConnection(Gauge);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}
