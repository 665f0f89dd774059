//! Everything around the data plane: listeners, administration, discovery, reloads, layout switches.
//!
//! | module | purpose |
//! |---|---|
//! | `control` | the control plane's state |
//! | `gateway`, `server` | startup and shutdown; listeners |
//! | `load` | tokenizers, templates and tables, loaded from disk into the first snapshot |
//! | `reload` | the next configuration, prepared alongside the running one and swapped in |
//! | `discovery` | backends that join and leave, found by DNS (addresses, SRV records) or Kubernetes |
//! | `switching` | policy-driven layout switches: reading a backend, deciding, driving its hook, a webhook or pools |
//! | `watchers` | the tasks that watch each backend |
//! | `admin`, `summary` | status, metrics, tables, backends, routing; the summary of what would be served |
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
