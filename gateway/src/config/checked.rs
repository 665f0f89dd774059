//! The configuration as it was checked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::{
    AuthConfig, BreakerRules, DrainRules, HealthConfig, ModelConfig, Override, QueueRules, RawLimits, RawLog, RawRetry,
    RawServerTls, RoutingConfig, SamplingConfig, SecretDigest, SwitchConfig, TablesConfig, Timeouts, TracingConfig,
};

/// The gateway's own health route on the data plane.
pub(crate) const HEALTH: &str = "/health";

/// A configuration that was checked: every name is unique, every address parses, every policy exists and has what it
/// needs. Files that it names are not opened yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where it came from.
    pub(crate) source: Source,
    pub(crate) server: ServerConfig,
    pub(crate) auth: AuthConfig,
    pub(crate) models: Vec<ModelConfig>,
    pub(crate) limits: RawLimits,
    pub(crate) timeouts: Timeouts,
    pub(crate) health: HealthConfig,
    pub(crate) retry: RawRetry,
    pub(crate) breaker: BreakerRules,
    pub(crate) queue: QueueRules,
    pub(crate) drain: DrainRules,
    pub(crate) routing: RoutingConfig,
    pub(crate) sampling: SamplingConfig,
    pub(crate) tables: TablesConfig,
    pub(crate) switch: SwitchConfig,
    pub(crate) tracing: TracingConfig,
    pub(crate) log: RawLog,
}

/// Where a configuration came from.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Source {
    /// `None` for one that was made in memory, which cannot be read again.
    pub(crate) file: Option<PathBuf>,
    /// As it stands there and is overridden, without defaults and secrets.
    pub(crate) document: serde_json::Value,
    /// Values that replace those of the file.
    pub(crate) overrides: Vec<Override>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ServerConfig {
    pub(crate) listen: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) admin_token_sha256: Option<SecretDigest>,
    pub(crate) tables_root: Option<PathBuf>,
    /// Paths that are passed through besides the gateway's own.
    pub(crate) extra_routes: Vec<String>,
    /// Origins of pages that may use the data plane, or `*`.
    pub(crate) cors_origins: Vec<String>,
    pub(crate) tls: Option<RawServerTls>,
    pub(crate) admin_tls: Option<RawServerTls>,
    pub(crate) credentials_interval: Duration,
}
