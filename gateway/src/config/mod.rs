//! The configuration: raw TOML ([`RawConfig`]), validated once into [`Config`], which the rest of the crate trusts.

/// Declares a section of the file: a name, what it is, and its keys, each with its type and its default.
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
    // The same with `$checked`, the section as the rest of the crate has it. Behind `=>` stand a field's name and type
    // there, and what makes it of the raw value: `fn(key: &str, raw) -> Result<field, ConfigError>`.
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
mod discovery;
mod document;
mod error;
mod faults;
mod fixed;
mod kubernetes;
mod log;
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

use semmoe_engines::http::BaseUrl;
use semmoe_engines::tls::ClientFiles;
use semmoe_engines::{Engine, RankBase};
use semmoe_planner::policy::Layout;

use crate::names::OtherNames;

pub(crate) use auth::{AuthConfig, KeyConfig};
pub use auth::{Forward, RawAuth, RawKey};
pub use discovery::RawDiscovery;
pub(crate) use discovery::{DiscoveryConfig, Found, Place, SourceKey};
pub use error::ConfigError;
pub(crate) use faults::BreakerRules;
pub use faults::{RawBreaker, RawRetry};
#[cfg(feature = "kube")]
pub(crate) use kubernetes::KubernetesConfig;
pub use kubernetes::RawKubernetes;
pub use log::{Access, LogFormat, RawLog};
pub use overrides::Override;
pub(crate) use raw::{HealthConfig, RoutingConfig, Timeouts};
pub use raw::{RawBackend, RawConfig, RawHealth, RawLimits, RawModel, RawRouting, RawServer, RawTimeouts};
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

impl Config {
    /// Reads and checks a TOML file; relative paths in it are below its folder.
    ///
    /// # Errors
    /// `ConfigError` names the file, and the key that is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::load_with(path, Vec::new())
    }

    /// The same with values that replace those of the file, also when the file is read again.
    ///
    /// # Errors
    /// As `Self::load`.
    pub fn load_with(path: &Path, overrides: Vec<Override>) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), cause: source.to_string() })?;
        let base = path.parent().unwrap_or(Path::new(""));
        let mut config = Self::from_toml_with(&text, base, overrides).map_err(|error| error.in_file(path))?;
        config.source.file = Some(path.to_owned());
        Ok(config)
    }

    /// Checks TOML text; relative paths in it are below `base`.
    ///
    /// # Errors
    /// `ConfigError` names the key that is wrong.
    pub fn from_toml(text: &str, base: &Path) -> Result<Self, ConfigError> {
        Self::from_toml_with(text, base, Vec::new())
    }

    /// The same with values that replace those of the text.
    ///
    /// # Errors
    /// As `Self::from_toml`.
    pub fn from_toml_with(text: &str, base: &Path, overrides: Vec<Override>) -> Result<Self, ConfigError> {
        let syntax = |error| ConfigError::syntax(text, &error);
        // Read as it stands first: only then do errors know their line.
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

    /// Checks a configuration made in memory; relative paths in it are below `base`.
    ///
    /// # Errors
    /// As `Self::from_toml`.
    pub fn from_raw(raw: RawConfig, base: &Path) -> Result<Self, ConfigError> {
        validate::validate(raw, base)
    }

    /// Log settings, for the program that starts the gateway.
    pub fn log(&self) -> RawLog {
        self.log.clone()
    }

    /// Addresses that will be bound: data, admin, metrics.
    pub fn addresses(&self) -> (SocketAddr, SocketAddr, Option<SocketAddr>) {
        (self.server.listen, self.server.admin, self.server.metrics)
    }
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

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelConfig {
    pub(crate) name: String,
    pub(crate) other_names: OtherNames,
    pub(crate) tokenizer: Option<PathBuf>,
    pub(crate) chat_template: Option<PathBuf>,
    /// The engines' clocks are so far ahead of UTC.
    pub(crate) zone_seconds: i32,
    pub(crate) chat_options: semmoe_text::ChatOptions,
    pub(crate) policy: PolicyConfig,
    /// Configured ones, and behind them those that were found.
    pub(crate) backends: Vec<BackendConfig>,
    pub(crate) discovery: Vec<DiscoveryConfig>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PolicyConfig {
    pub(crate) name: String,
    /// With the model's own baseline.
    pub(crate) settings: semmoe_routing::Settings,
    pub(crate) canary: Option<semmoe_routing::Canary>,
    /// The inputs that any of them reads. With a canary all requests are scored, so that both sides can be compared.
    pub(crate) needs: semmoe_routing::Needs,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BackendConfig {
    pub(crate) name: String,
    pub(crate) engine: Engine,
    /// One, or one for each rank.
    pub(crate) urls: Vec<BaseUrl>,
    /// The model's name there, where it is not the clients'.
    pub(crate) served_name: Option<String>,
    pub(crate) tables: Option<PathBuf>,
    pub(crate) ranks: Option<u16>,
    pub(crate) placement_digest: Option<String>,
    pub(crate) rank_base: Option<RankBase>,
    pub(crate) api_key_file: Option<PathBuf>,
    /// For URLs that begin with https.
    pub(crate) tls: Option<ClientFiles>,
    pub(crate) http2: bool,
    /// The layout that an engine without a switch hook runs, or starts in.
    pub(crate) layout: Option<Layout>,
    /// `None` for one that is configured.
    pub(crate) found: Option<Found>,
}

impl BackendConfig {
    /// Its only URL, or the first of several: a checked configuration has one.
    pub(crate) fn first_url(&self) -> &BaseUrl {
        &self.urls[0]
    }

    /// Whether this is the same engine, spoken to in the same way: all but its tables is equal.
    pub(crate) fn is_same_engine(&self, other: &Self) -> bool {
        let without_tables = |config: &Self| Self { tables: None, ..config.clone() };
        without_tables(self) == without_tables(other)
    }

    /// Whether what runs on the ranks of the one runs on those of the other: the same engine at the same place.
    pub(crate) fn is_same_ranks(&self, other: &Self) -> bool {
        (&self.name, self.engine, &self.urls) == (&other.name, other.engine, &other.urls)
    }
}
