//! Everything around the data plane: listeners, administration, discovery, reloads, switches of layouts.
//!
//! | module | what |
//! |---|---|
//! | `control` | the state of the control plane |
//! | `gateway`, `server` | startup and shutdown; listeners |
//! | `load` | tokenizers, templates and tables from disk into the first snapshot |
//! | `reload` | the next configuration, prepared beside the running one and swapped in |
//! | `discovery` | backends found by DNS (addresses, SRV records) or Kubernetes that come and go |
//! | `switching` | layouts switched by the policy: reading a backend, deciding, driving its hook, a webhook or pools |
//! | `watchers` | the tasks that watch each backend |
//! | `admin`, `summary` | status, metrics, tables, backends, routing; what a start would serve |
//! | `credentials`, `memory` | key and certificate files, reread when they change; freed memory returned to the system |

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
