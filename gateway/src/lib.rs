//! The gateway: data plane, admin plane, backends, one reloadable snapshot.
//!
//! Its modules form layers, lowest first; each imports only from those before it:
//!
//! | module | purpose |
//! |---|---|
//! | [`config`] | TOML, raw and validated |
//! | `observe` | metrics, traces, sampled requests |
//! | `backends` | one engine and all of them: health, pins, pools, tables, the atomically swapped snapshot |
//! | `data` | the path of a request to an engine and back |
//! | `shell` | listeners, administration, discovery, reloads, layout switches |
//!
//! Bodies pass through byte for byte, except for the pin and an engine's own name for the model. The modules document
//! which requests are retried, fail open or are refused.

mod backends;
pub mod config;
mod data;
mod observe;
mod shell;

pub use backends::backend::Health;
pub use backends::error::StartError;
pub use config::{Access, Meanwhile, RawServerTls, SwitchMode, TlsVersion};
pub use config::{
    Config, ConfigError, Forward, LogFormat, Override, RawAuth, RawBackend, RawBreaker, RawConfig, RawDiscovery,
    RawDrain, RawHealth, RawKey, RawKubernetes, RawLimits, RawLog, RawModel, RawQueue, RawRetry, RawRouting,
    RawSampling, RawServer, RawSwitch, RawTables, RawTimeouts, RawTracing,
};
pub use shell::discovery::{Resolve, Resolved, SystemResolver};
pub use shell::gateway::{Gateway, Running};
pub use shell::reload::{ReloadError, Reloaded};
pub use shell::server::raise_file_limit;
pub use shell::summary::{Probed, Summary, Troubles};
