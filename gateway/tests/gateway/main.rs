//! The gateway against mock engines on loopback. One binary, a module per subject.
#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

mod adapters;
mod backends;
mod bodies;
mod breakers;
mod busy;
mod chaos;
mod chats;
mod codings;
mod configs;
mod cors;
mod counts;
mod dialects;
mod discovery;
mod drains;
mod exposition;
mod failures;
mod fields;
mod forged;
mod hostile;
mod http2;
#[cfg(feature = "kube")]
mod kubernetes;
mod live;
mod live_vllm;
mod middle;
mod misfits;
mod not_taken;
mod openapi;
mod operating;
mod page;
mod pinned_routes;
mod pins;
mod placement;
mod policies;
mod queues;
mod reference;
mod reload;
mod replicas;
mod retries;
mod returns;
mod rollback;
mod routes;
mod srv;
mod start;
mod streams;
mod support;
mod swaps;
mod switching;
mod templates;
mod tls;
mod token;
mod traces;
mod trust;
mod unpinned;
mod watched;
#[path = "../hostile/wire.rs"]
#[allow(dead_code, reason = "the other binary uses the rest")]
mod wire;

use support::PATIENCE;
