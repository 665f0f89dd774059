//! Tests of the profiler through its public interface.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

mod build;
mod crash;
mod dialects;
mod import;
mod profiles;
mod prompts;
mod record;
mod show;
