//! Interfaces to engines: requests, pins, loads, routed experts, and the HTTP client.
//!
//! | module | purpose |
//! |---|---|
//! | [`http`] | the HTTP client for all connections to engines |
//! | [`sglang`] | SGLang's dialect, which semmoe's worker shares: `/generate`, `/v1/loads`, `/server_info`, routed experts |
//! | [`vllm`] | vLLM's dialect: version, ranks and counters from its metrics, how it numbers ranks in pins |
//! | [`dialect`] | how a pin is sent, by engine, version and route |
//! | [`pin`] | pinning a request to one attention-DP rank without changing other bytes |
//! | [`fields`] | request body members that are not simply forwarded |
//! | [`failures`] | detecting responses that report an engine failure |
//! | [`refusal`] | detecting responses that reject a pin to a nonexistent rank |
//! | [`json`] | a scanner of top-level JSON members for bodies that must not be re-serialised |
//! | [`probe`] | querying an engine's health, version and ranks |
//! | [`metrics`] | samples in the Prometheus text format |
//! | [`pieces`] | extracting ranks and token counts from pieces of responses |
//! | [`recording`] | requesting the routed experts of entire prompts, and reading them from any engine's response |
//! | [`routed`] | requesting the routed experts of live requests, and removing them from responses |
//! | [`sse`] | event boundaries in a stream, so that nothing is inserted inside an event |
//! | [`switch`] | switching the layout of semmoe's worker while it serves |
//! | [`verify`] | whether pins take effect: probes, exact evidence, a verdict with hysteresis, when to probe again |
//!
//! Plain OpenAI servers can be pinned only by a URL per rank; requests to them are relayed, and their health is probed.

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

/// Returns the Unix time in seconds on this machine's clock, for chat templates that use the date.
pub fn unix_seconds() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
