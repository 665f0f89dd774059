//! Tests of tables, profiles and traces through their public interface; `damage` counts allocations and is a separate
//! binary.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../checkpoint/mod.rs"]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;

mod arrays;
mod embeddings;
mod even;
mod export;
mod likely;
mod merge;
mod permute;
mod permute_damage;
mod permute_refused;
mod prompt_split;
mod round_trip;
mod rules;
mod streaming;
mod write;
