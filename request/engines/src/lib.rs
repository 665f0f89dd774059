//! The interface of engines: requests, pins, loads, routed experts; and the one HTTP client.
//!
//! | module | what |
//! |---|---|
//! | [`http`] | the client of every part that speaks to an engine |
//! | [`sglang`] | SGLang's dialect, which semmoe's worker speaks too: `/generate`, `/v1/loads`, `/server_info`, routed experts |
//! | [`vllm`] | vLLM's dialect: version, ranks and counters from its metrics, how it counts ranks in pins |
//! | [`dialect`] | where a pin travels, by engine, version and route |
//! | [`pin`] | how a request is pinned to one attention-DP rank without touching other bytes |
//! | [`fields`] | members of request bodies that are not just passed on |
//! | [`failures`] | answers in which an engine says that it failed |
//! | [`refusal`] | answers in which an engine says that it has no such rank |
//! | [`json`] | a scanner of top-level JSON members for bodies that must not be re-serialised |
//! | [`probe`] | what an engine says about itself |
//! | [`metrics`] | samples of Prometheus' text format |
//! | [`pieces`] | ranks and token counts in pieces of answers |
//! | [`recording`] | routed experts of whole prompts asked for, and read from wherever the engine puts them |
//! | [`routed`] | routed experts asked for in requests and cut out of answers |
//! | [`sse`] | where events end in a stream, so that nothing is put inside one |
//! | [`switch`] | layouts of semmoe's worker that change while it serves |
//! | [`verify`] | whether pins take effect: probes, exact evidence, a verdict with hysteresis, when to probe again |
//!
//! Plain OpenAI servers cannot be pinned but by a URL for each rank; they are relayed to and probed.

pub mod dialect;
mod engine;
pub mod failures;
pub mod fields;
pub mod http;
pub mod json;
pub mod metrics;
pub mod pieces;
pub mod pin;
pub mod probe;
pub mod recording;
pub mod refusal;
pub mod rendering;
pub mod routed;
pub mod sglang;
pub mod sse;
pub mod switch;
pub mod tls;
pub mod verify;
mod version;
pub mod vllm;

pub use dialect::{Carrier, Dialect, RankBase};
pub use engine::{Engine, Route, UnknownEngine};
pub use version::Version;

/// Seconds since 1970 on this machine's clock, in UTC: what a chat template that asks for the date gets.
pub fn unix_seconds() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
