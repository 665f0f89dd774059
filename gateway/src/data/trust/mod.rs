//! Access control for the data plane.
//!
//! | part | purpose |
//! |---|---|
//! | `keys` | API keys: digests compared in constant time, models that a key may use |
//!
//! Keys are part of the configuration in the snapshot, so a reload replaces them along with the rest.

mod keys;

use http::{HeaderMap, HeaderName, header};

use crate::backends::RequestError;
use crate::config::{Access, AuthConfig, Config, Forward};
use crate::observe::Metrics;

pub(crate) use keys::Caller;

/// The header in which some client libraries send their key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Authenticates a request, and removes its key from the headers if the engine must not see it.
pub(crate) fn admit(config: &AuthConfig, headers: &mut HeaderMap, metrics: &Metrics) -> Result<Caller, RequestError> {
    let caller = keys::check(&config.keys, headers).inspect_err(|error| {
        let missing = matches!(error, RequestError::KeyMissing);
        metrics.trust.auth_failure(if missing { "missing" } else { "wrong" });
    })?;
    if config.forward == Forward::Strip {
        headers.remove(header::AUTHORIZATION);
        headers.remove(API_KEY);
    }
    Ok(caller)
}

/// Warns at start about listeners that anyone on the network can use.
pub(crate) fn warn_of_exposure(config: &Config) {
    let server = &config.server;
    if !server.listen.ip().is_loopback() && config.auth.keys.is_empty() {
        tracing::warn!(
            listen = %server.listen,
            "anyone who can reach this address can use the models: set [[auth.keys]], or listen on loopback"
        );
    }
    if config.log.access == Access::All && !tracing::enabled!(target: "semmoe::access", tracing::Level::INFO) {
        tracing::warn!("log.access is \"all\", but the log level hides it: start with --log info");
    }
    if let Some(metrics) = server.metrics.filter(|metrics| !metrics.ip().is_loopback()) {
        tracing::info!(%metrics, "anyone who can reach this address can read the metrics");
    }
}
