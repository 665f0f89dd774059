//! Everything around the data plane: listeners, administration, discovery, reloads, switches of layouts.
//!
//! | module | what |
//! |---|---|
//! | `control` | the state of the control plane |
//! | `gateway`, `server` | start and shutdown; listeners |
//! | `load` | tokenizers, templates and tables from disk into the first snapshot |
//! | `reload` | the next configuration, made beside the running one and swapped in |
//! | `discovery` | backends that are found by DNS (addresses, SRV records) or Kubernetes, and come and go |
//! | `switching` | layouts changed as the policy says: reading a backend, deciding, driving its hook, a webhook or pools |
//! | `watchers` | the tasks that watch each backend |
//! | `admin`, `summary` | status, metrics, tables, backends, routing; what a start would serve |
//! | `credentials`, `memory` | files with keys and certificates, read again when they change; freed memory goes back to the system |

pub(crate) mod admin;
pub(crate) mod control;
pub(crate) mod credentials;
pub(crate) mod discovery;
pub(crate) mod gateway;
pub(crate) mod load;
pub(crate) mod memory;
pub(crate) mod reload;
pub(crate) mod server;
pub(crate) mod summary;
pub(crate) mod switching;
pub(crate) mod watchers;
