//! `[queue]` and `[drain]`: how long requests may wait, and how the process shuts down.

use std::time::Duration;

use super::ConfigError;
use super::value::{MAX_SECONDS, seconds, within};

/// An upper bound: no engine runs more requests at once.
const MAX_IN_FLIGHT: u32 = 1 << 20;
/// An upper bound: no listener has more connections.
const MAX_QUEUED: usize = 1 << 20;

section! { RawQueue => #[derive(Copy)] QueueRules, "queue",
    "`[queue]`: requests that wait for a rank, in one queue per model.";
    /// Maximum number of requests in flight per rank; further ones wait in the gateway. Absent: no limit, because
    /// engines have their own queues and know their memory. A limit slightly above a rank's concurrency lets late
    /// requests run on the rank that frees up first.
    max_in_flight: Option<u32> = None => max_in_flight: Option<u32> = limit,
    /// Maximum number of waiting requests; further ones are answered 429.
    max_queued: usize = 1024 => max_queued: usize = length,
    /// Maximum wait for room on a rank; then 429.
    max_wait_seconds: f64 = 30.0 => max_wait: Duration = seconds,
    /// Head start, in seconds, per unit of a request's `priority` (0 if absent). With 5.0, a priority 2 request
    /// precedes priority 0 requests that arrived less than 10 s earlier and follows older ones, so none waits forever.
    /// Negative if lower numbers are more urgent, as in vLLM. 0: in order of arrival.
    priority_seconds: f64 = 0.0 => priority_seconds: f64 = head_start,
    /// Maximum wait while no backend accepts requests; then 503. 0: no wait.
    wait_for_backend_seconds: f64 = 1.0 => wait_for_backend: Duration = seconds_or_none,
}

section! { RawDrain => #[derive(Copy)] DrainRules, "drain",
    "`[drain]`: how the process shuts down on SIGTERM.";
    /// How long requests are still accepted after `/readyz` turns 503, so that load balancers notice first.
    delay_seconds: f64 = 2.0 => delay: Duration = seconds_or_none,
    /// How long running requests may then continue; the rest are closed with an error.
    grace_seconds: f64 = 25.0 => grace: Duration = seconds_or_none,
}

fn limit(key: &str, limit: Option<u32>) -> Result<Option<u32>, ConfigError> {
    match limit {
        Some(limit) if !(1..=MAX_IN_FLIGHT).contains(&limit) => {
            let cause = format!("{limit}, expected 1 to {MAX_IN_FLIGHT}; omit the key for no limit");
            Err(ConfigError::value(key, cause))
        }
        limit => Ok(limit),
    }
}

fn length(key: &str, most: usize) -> Result<usize, ConfigError> {
    within(key, most, 0..=MAX_QUEUED)
}

fn head_start(key: &str, value: f64) -> Result<f64, ConfigError> {
    within(key, value, -MAX_SECONDS..=MAX_SECONDS)
}

/// Validates a time that may be zero.
fn seconds_or_none(key: &str, value: f64) -> Result<Duration, ConfigError> {
    within(key, value, 0.0..=MAX_SECONDS).map(Duration::from_secs_f64)
}
