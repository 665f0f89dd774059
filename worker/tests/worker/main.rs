//! The worker over all its carriers, layouts and families. Tests that measure their own process, or restart it, are
//! separate programs beside this one.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../links/mod.rs"]
mod links;
#[path = "../support/mod.rs"]
mod support;

mod attention_groups;
mod attention_tp;
mod carriers;
mod checkpoint;
mod domains;
mod experts_hybrid;
mod experts_tp;
mod families;
mod forced;
mod golden;
mod hostile_config;
mod layouts;
mod logprobs;
mod network;
mod permuted;
mod prefix;
mod priorities;
mod ranks;
mod replicas;
mod requests;
mod serving;
mod serving_tp;
mod startup;
mod streamed;
mod switch_experts;
mod switching;
mod switching_attention;
mod switching_groups;
mod switching_hybrid;
mod transport;
mod trust;
mod wire;
