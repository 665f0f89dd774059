//! The configuration: raw TOML ([`RawConfig`]), validated once into [`Config`], which the rest of the crate trusts.

/// Declares a section of the file: its name, its description, and its keys with types and defaults.
macro_rules! section {
    ($name:ident, $about:literal; $($(#[$doc:meta])* $key:ident: $kind:ty = $default:expr,)*) => {
        #[doc = $about]
        #[derive(Clone, Debug, PartialEq, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $($(#[$doc])* pub $key: $kind,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($key: $default,)* }
            }
        }
    };
    // A section with a validated counterpart, `$checked`, for the rest of the crate. `=>` gives a validated field's
    // name and type, and the function that validates the raw value: `fn(key: &str, raw) -> Result<field>`.
    ($name:ident => $(#[$meta:meta])* $checked:ident, $section:literal, $about:literal;
     $($(#[$doc:meta])* $key:ident: $kind:ty = $default:expr => $field:ident: $type:ty = $check:expr,)*) => {
        section! { $name, $about; $($(#[$doc])* $key: $kind = $default,)* }
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub(crate) struct $checked {
            $(pub(crate) $field: $type,)*
        }
        impl $checked {
            pub(super) fn check(raw: $name) -> Result<Self, super::ConfigError> {
                Ok(Self { $($field: $check(concat!($section, ".", stringify!($key)), raw.$key)?,)* })
            }
        }
    };
}

mod auth;
mod backend;
mod discovery;
mod document;
mod error;
mod faults;
mod fixed;
mod kubernetes;
mod log;
mod model;
mod overrides;
mod policy;
mod raw;
mod sampling;
mod switching;
mod tables;
mod tls;
mod tracing;
mod validate;
mod value;
mod waiting;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use auth::{ANY_ORIGIN, AuthConfig, KeyConfig};
pub use auth::{Forward, RawAuth, RawKey};
pub use backend::RawBackend;
pub(crate) use backend::{BackendConfig, Found};
pub use discovery::RawDiscovery;
pub(crate) use discovery::{DiscoveryConfig, Place, SourceKey, is_dns_name};
pub use error::ConfigError;
use error::Result;
pub(crate) use faults::BreakerRules;
pub use faults::{RawBreaker, RawRetry};
#[cfg(feature = "kube")]
pub(crate) use kubernetes::KubernetesConfig;
pub use kubernetes::RawKubernetes;
pub use log::{Access, LogFormat, RawLog};
pub(crate) use model::{ModelConfig, OtherNames, PolicyConfig};
pub use overrides::Override;
pub(crate) use raw::{HealthConfig, RoutingConfig, Timeouts};
pub use raw::{RawConfig, RawHealth, RawLimits, RawModel, RawRouting, RawServer, RawTimeouts};
pub use sampling::RawSampling;
pub(crate) use sampling::{DriftRules, ProfileConfig, RollingLimits, SamplingConfig, TraceConfig};
pub use switching::{Meanwhile, RawSwitch, SwitchMode};
pub(crate) use switching::{SwitchConfig, Webhook};
pub use tables::RawTables;
pub(crate) use tables::TablesConfig;
pub use tls::{RawServerTls, TlsVersion};
pub use tracing::RawTracing;
pub(crate) use tracing::TracingConfig;
pub(crate) use value::SecretDigest;
pub(crate) use waiting::{DrainRules, QueueRules};
pub use waiting::{RawDrain, RawQueue};

/// The gateway's own health route on the data plane.
pub(crate) const HEALTH: &str = "/health";

/// A validated configuration: every name is unique, every address parses, every policy exists and has what it needs.
/// Files that it names are not opened yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Origin of the configuration.
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

impl Config {
    /// Reads and validates a TOML file. Relative paths in it are resolved against its folder.
    ///
    /// # Errors
    /// `ConfigError` names the file and the invalid key.
    pub fn load(path: &Path) -> Result<Self> {
        Self::load_with(path, Vec::new())
    }

    /// Reads and validates a TOML file, with `overrides` replacing its values now and at every reload. Relative paths
    /// are resolved against its folder.
    ///
    /// # Errors
    /// `ConfigError` names the file and the invalid key.
    pub fn load_with(path: &Path, overrides: Vec<Override>) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source: source.into() })?;
        let base = path.parent().unwrap_or(Path::new(""));
        let mut config = Self::from_toml_with(&text, base, overrides).map_err(|error| error.in_file(path))?;
        config.source.file = Some(path.to_owned());
        Ok(config)
    }

    /// Validates TOML text. Relative paths in it are resolved against `base`.
    ///
    /// # Errors
    /// `ConfigError` names the invalid key.
    pub fn from_toml(text: &str, base: &Path) -> Result<Self> {
        Self::from_toml_with(text, base, Vec::new())
    }

    /// Validates TOML text, with `overrides` replacing its values. Relative paths are resolved against `base`.
    ///
    /// # Errors
    /// `ConfigError` names the invalid key.
    pub fn from_toml_with(text: &str, base: &Path, overrides: Vec<Override>) -> Result<Self> {
        let syntax = |error| ConfigError::syntax(text, error);
        // Parse the unmodified text first, so that errors carry line numbers.
        let mut raw: RawConfig = toml::from_str(text).map_err(syntax)?;
        let mut document: toml::Table = toml::from_str(text).map_err(syntax)?;
        if !overrides.is_empty() {
            document = overrides::apply(document, &overrides)?;
            raw = document.clone().try_into().map_err(syntax)?;
        }
        let mut config = Self::from_raw(raw, base)?;
        config.source = Source { file: None, document: document::document(document), overrides };
        Ok(config)
    }

    /// Validates a configuration built in memory. Relative paths in it are resolved against `base`.
    ///
    /// # Errors
    /// `ConfigError` names the invalid key.
    pub fn from_raw(raw: RawConfig, base: &Path) -> Result<Self> {
        validate::validate(raw, base)
    }

    /// Returns the log settings, for the program that starts the gateway.
    pub fn log(&self) -> RawLog {
        self.log.clone()
    }

    /// Returns the addresses to bind: data, admin, metrics.
    pub fn addresses(&self) -> (SocketAddr, SocketAddr, Option<SocketAddr>) {
        (self.server.listen, self.server.admin, self.server.metrics)
    }
}

/// Origin of a configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Source {
    /// The file; `None` for a configuration built in memory, which cannot be reloaded.
    pub(crate) file: Option<PathBuf>,
    /// The file's values with overrides applied, and without defaults or secrets.
    pub(crate) document: serde_json::Value,
    /// Overrides that replace the file's values.
    pub(crate) overrides: Vec<Override>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ServerConfig {
    pub(crate) listen: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) admin_token_sha256: Option<SecretDigest>,
    pub(crate) tables_root: Option<PathBuf>,
    /// Additional paths that are passed through to engines.
    pub(crate) extra_routes: Vec<String>,
    /// Origins of the web pages that may use the data plane, or `*`.
    pub(crate) cors_origins: Vec<String>,
    pub(crate) tls: Option<RawServerTls>,
    pub(crate) admin_tls: Option<RawServerTls>,
    pub(crate) credentials_interval: Duration,
}
