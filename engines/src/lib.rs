//! What engines accept and return: requests, pins, loads, routed experts; and the one HTTP client.
//!
//! | module | what |
//! |---|---|
//! | [`http`] | the client of every part that speaks to an engine |
//! | [`sglang`] | SGLang's dialect, which semmoe's worker speaks too: `/generate`, `/v1/loads`, `/server_info`, routed experts |
//! | [`pin`] | how a request is pinned to one attention-DP rank, per engine and route, without touching other bytes |
//! | [`json`] | a scanner of top-level JSON members for bodies that must not be re-serialised |
//! | [`probe`] | what an engine says about itself |
//!
//! vLLM is thin: the pin header and `/health`. Plain OpenAI servers cannot be pinned; they are relayed to and probed.

mod engine;
pub mod http;
pub mod json;
pub mod pin;
pub mod probe;
pub mod sglang;

pub use engine::{Engine, Route, UnknownEngine};
