//! Tests of the solver through its public interface.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../common/mod.rs"]
mod common;

mod bounds;
mod evaluate;
mod given;
mod highs;
mod hold_out;
mod nodes;
mod objective;
mod padding;
mod paper;
mod prior;
mod recorded;
mod replicas;
mod solve;
mod warm;
