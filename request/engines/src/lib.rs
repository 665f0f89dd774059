//! Interfaces to engines: requests, pins, loads, routed experts, and the HTTP client.
//!
//! | module | what |
//! |---|---|
//! | [`http`] | the HTTP client for all connections to engines |
//! | [`sglang`] | SGLang's dialect, which semmoe's worker shares: `/generate`, `/v1/loads`, `/server_info`, routed experts |
//! | [`vllm`] | vLLM's dialect: version, ranks and counters from its metrics, how it counts ranks in pins |
//! | [`dialect`] | how a pin is sent, by engine, version and route |
//! | [`pin`] | pinning a request to one attention-DP rank without changing other bytes |
//! | [`fields`] | members of request bodies that are not simply passed on |
//! | [`failures`] | answers that report an engine failure |
//! | [`refusal`] | answers that report that there is no such rank |
//! | [`json`] | a scanner of top-level JSON members for bodies that must not be re-serialised |
//! | [`probe`] | an engine's report about itself |
//! | [`metrics`] | samples in Prometheus' text format |
//! | [`pieces`] | ranks and token counts in pieces of answers |
//! | [`recording`] | requesting routed experts of entire prompts, and reading them from wherever the engine puts them |
//! | [`routed`] | requesting routed experts of live requests, and cutting them out of answers |
//! | [`sse`] | event boundaries in a stream, so that nothing is inserted inside an event |
//! | [`switch`] | changing the layout of semmoe's worker while it serves |
//! | [`verify`] | whether pins take effect: probes, exact evidence, a verdict with hysteresis, when to probe again |
//!
//! Plain OpenAI servers can only be pinned by a URL per rank; they are relayed to and probed.

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
mod shared_error;
pub mod sse;
pub mod switch;
pub mod tls;
pub mod verify;
mod version;
pub mod vllm;

pub use dialect::{Carrier, Dialect, RankBase};
pub use engine::{Engine, Route, UnknownEngine};
pub use shared_error::SharedError;
pub use version::Version;

/// Seconds since 1970 on this machine's clock, in UTC, for chat templates that use the date.
pub fn unix_seconds() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
