//! The engines behind the gateway: their state, which requests they accept, and the tables that match them.
//!
//! | module | purpose |
//! |---|---|
//! | `state` | all backends of one gateway, and their current snapshot |
//! | `snapshot`, `current` | all reloadable state, swapped atomically; read without a lock |
//! | `backend`, `health`, `admission`, `compat`, `verdict` | one engine, its probes and their consequences, whether its tables match |
//! | `gate`, `breaker`, `drains`, `availability` | whether a healthy backend and its ranks receive requests: drains (remembered while a backend is away), circuit breakers |
//! | `pins` | whether pins take effect: probes before a backend receives requests, and periodically after |
//! | `pool` | a model's ranks, their accounts, leases |
//! | `plan` | which policy places a request: the model's own, or its canary's baseline |
//! | `budget` | a model's retry budget |
//! | `queue` | requests waiting for a rank or for a backend |
//! | `flow`, `heads`, `silence` | the in-flight load on a backend; whether silent streams indicate a dead scheduler |
//! | `tables` | tables loaded while the gateway runs: copied, checked, swapped in, watched, retained for rollbacks |
//! | `parity`, `vocabulary`, `names` | whether an engine tokenizes chats as the gateway does; its token ids; model names |
//! | `outgoing`, `stamp` | a backend's connections, key and certificates; file states |
//! | `error`, `request_id` | the one table that maps errors to HTTP statuses; a request's id in logs, in responses and at the engine |

pub(crate) mod admission;
pub(crate) mod availability;
pub(crate) mod backend;
pub(crate) mod breaker;
pub(crate) mod budget;
pub(crate) mod compat;
pub(crate) mod current;
pub(crate) mod drains;
pub(crate) mod error;
pub(crate) mod flow;
pub(crate) mod gate;
pub(crate) mod heads;
pub(crate) mod health;
pub(crate) mod names;
pub(crate) mod outgoing;
pub(crate) mod parity;
pub(crate) mod pins;
pub(crate) mod plan;
pub(crate) mod pool;
pub(crate) mod queue;
pub(crate) mod request_id;
pub(crate) mod silence;
pub(crate) mod snapshot;
pub(crate) mod stamp;
pub(crate) mod state;
pub(crate) mod tables;
pub(crate) mod verdict;
pub(crate) mod vocabulary;

pub(crate) use availability::Trial;
pub(crate) use backend::{Backend, Health, Watched, WatchedBackends};
pub(crate) use budget::Paid;
pub(crate) use error::{Form, RequestError, StartError};
pub(crate) use flow::FlowPart;
pub(crate) use gate::Aside;
pub(crate) use heads::WaitingStream;
pub(crate) use pins::record::{Belief, PinState, RouteState};
pub(crate) use plan::Plan;
pub(crate) use pool::{Lease, Run, Slot};
pub(crate) use queue::{Nowhere, Queue, Refused, Room};
pub(crate) use request_id::{REQUEST_ID, RequestId};
pub(crate) use snapshot::{Member, Model, Snapshot, Text, TextSource, UnreadText, next_pool, text_route};
pub(crate) use stamp::FileState;
pub(crate) use state::Backends;
pub(crate) use tables::{EarlierTables, LoadedTables, Origin};
pub(crate) use verdict::Fit;
pub(crate) use vocabulary::Vocabulary;
