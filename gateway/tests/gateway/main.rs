//! The gateway against mock engines on loopback. One binary, a module per subject.
#![allow(clippy::unwrap_used, reason = "a failed step of a test may panic")]

mod adapters;
mod backends;
mod bodies;
mod breakers;
mod busy;
mod chaos;
mod configs;
mod conformity;
mod counts;
mod dialects;
mod discovery;
mod drains;
mod failures;
mod forged;
mod hostile;
mod http2;
#[cfg(feature = "kube")]
mod kubernetes;
mod live;
mod middle;
mod openapi;
mod operating;
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
mod tls;
mod token;
mod traces;
mod trust;
mod unpinned;
mod watched;
