//! `[queue]` and `[drain]`: what waits, and for how long.

use std::time::Duration;

use super::ConfigError;
use super::value::{MAX_SECONDS, seconds, within};

/// More than any engine runs at a time.
const MAX_IN_FLIGHT: u32 = 1 << 20;
/// More than any listener has connections.
const MAX_QUEUED: usize = 1 << 20;

section! { RawQueue => #[derive(Copy)] QueueRules, "queue",
    "`[queue]`: requests that wait for a rank, in one queue per model.";
    /// Requests in flight per rank beyond which further requests wait in the gateway. Absent: no limit, because engines
    /// queue by themselves and know their memory. A limit slightly above what a rank runs at once lets late requests go
    /// to the rank that frees up first.
    max_in_flight: Option<u32> = None => max_in_flight: Option<u32> = limit,
    /// Maximum number of waiting requests; more get 429.
    max_queued: usize = 1024 => max_queued: usize = length,
    /// Longest wait for room on a rank; then 429.
    max_wait_seconds: f64 = 30.0 => max_wait: Duration = seconds,
    /// Seconds of waiting that each step of a request's `priority` (0 without one) is worth: with 5.0, priority 2 goes
    /// before those of priority 0 that came less than 10 s earlier, and behind all others, so none waits forever.
    /// Negative if lower numbers are more urgent, as in vLLM. 0: in order of arrival.
    priority_seconds: f64 = 0.0 => priority_seconds: f64 = head_start,
    /// Longest wait while no backend accepts requests; then 503. 0: none.
    wait_for_backend_seconds: f64 = 1.0 => wait_for_backend: Duration = seconds_or_none,
}

section! { RawDrain => #[derive(Copy)] DrainRules, "drain",
    "`[drain]`: how the process ends when it is asked to (SIGTERM).";
    /// How long requests are accepted after `/readyz` turns 503, so that load balancers notice first.
    delay_seconds: f64 = 2.0 => delay: Duration = seconds_or_none,
    /// How long running requests may continue after that; the rest are closed with an error.
    grace_seconds: f64 = 25.0 => grace: Duration = seconds_or_none,
}

fn limit(key: &str, limit: Option<u32>) -> Result<Option<u32>, ConfigError> {
    match limit {
        Some(limit) if !(1..=MAX_IN_FLIGHT).contains(&limit) => {
            let cause = format!("{limit}, expected 1 to {MAX_IN_FLIGHT}, or none for no limit");
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

/// A time that may be zero.
fn seconds_or_none(key: &str, value: f64) -> Result<Duration, ConfigError> {
    within(key, value, 0.0..=MAX_SECONDS).map(Duration::from_secs_f64)
}
