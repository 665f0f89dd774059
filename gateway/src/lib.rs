//! The gateway: data plane, admin plane, backends, one reloadable snapshot.
//!
//! | module | what |
//! |---|---|
//! | [`config`] | TOML, raw and validated |
//! | `load` | tokenizers, templates and tables from disk into the first snapshot |
//! | `snapshot`, `current` | everything reloadable, swapped at once; read without a lock |
//! | `plan` | which policy places a request: the model's, or the baseline of its canary |
//! | `gate`, `breaker`, `drains`, `availability` | whether a healthy backend gets requests: drained (also once it comes back), circuit breaker; and so its ranks |
//! | `budget` | how many retries a model's requests pay for |
//! | `queue` | requests that wait for a rank, or for a backend |
//! | `pool` | the ranks of a model, their accounts, leases |
//! | `backend`, `health`, `compat` | one engine; probing it; whether tables fit it |
//! | `flow`, `heads`, `silence` | what is in flight on a backend; whether its silent streams mean that its scheduler is dead |
//! | `tables` | tables loaded while the gateway runs: copied, checked, swapped in, watched, kept to go back to |
//! | `switching` | layouts changed as the policy says: reading a backend, deciding, driving its hook, a webhook or pools |
//! | `pins` | whether pins take effect: probes before a backend gets requests, and now and then after |
//! | `otlp` | spans of requests for an OpenTelemetry collector |
//! | `live` | a share of the requests asked which experts they took; drift; rolling profiles |
//! | `reload` | the next configuration, made beside the running one and swapped in |
//! | `discovery` | backends that are found by DNS (addresses, SRV records) or Kubernetes, and come and go |
//! | `watchers` | the tasks that watch each backend |
//! | `data` | a request's way to an engine and back |
//! | `admin` | status, metrics, tables, backends, routing |
//! | `trust`, `request_id` | API keys; the name of one request in logs, answers and at the engine |
//! | `body_memory` | what request bodies may hold together |
//! | `outgoing` | what a backend is spoken to with: its key, certificates |
//! | `credentials` | files with keys and certificates, read again when they change |
//! | `memory` | freed memory goes back to the system |
//! | `server`, `gateway` | listeners; start and shutdown |
//! | `outflow`, `stall` | answers at the pace of their clients; clients that take nothing |
//! | `error` | why it does not start, and the one table from errors to HTTP statuses |
//!
//! Bodies pass through byte for byte, but for the pin and an engine's own name of the model; what is retried, what
//! fails open and what is refused is said in the modules' own words.

mod admin;
mod availability;
mod backend;
mod body_memory;
mod breaker;
mod budget;
mod compat;
pub mod config;
mod credentials;
mod current;
mod data;
mod discovery;
mod drains;
mod error;
mod flow;
mod gate;
mod gateway;
mod heads;
mod health;
mod live;
mod load;
mod memory;
mod metrics;
mod names;
mod otlp;
mod outflow;
mod outgoing;
mod parity;
mod pins;
mod plan;
mod pool;
mod queue;
mod reload;
mod request_id;
mod server;
mod silence;
mod snapshot;
mod stall;
mod stamp;
mod state;
mod summary;
mod switching;
mod tables;
mod trust;
mod verdict;
mod vocabulary;
mod watchers;

pub use backend::Health;
pub use config::{Access, Meanwhile, RawServerTls, SwitchMode, TlsVersion};
pub use config::{
    Config, ConfigError, Forward, LogFormat, Override, RawAuth, RawBackend, RawBreaker, RawConfig, RawDiscovery,
    RawDrain, RawHealth, RawKey, RawKubernetes, RawLimits, RawLog, RawModel, RawQueue, RawRetry, RawRouting,
    RawSampling, RawServer, RawSwitch, RawTables, RawTimeouts, RawTracing,
};
pub use discovery::{Resolve, Resolved, SystemResolver};
pub use error::StartError;
pub use gateway::{Gateway, Running};
pub use reload::{ReloadError, Reloaded};
pub use server::raise_file_limit;
pub use summary::{Probed, Summary, Troubles};
