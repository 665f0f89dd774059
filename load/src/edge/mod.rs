//! Sockets, threads and clocks: kept as small as possible.

mod connection;
mod exchange;
mod pacer;
mod run;
mod shared;
mod target;
mod threads;
mod worker;

pub use run::{Snapshot, compare, run};
pub use target::only_model;
