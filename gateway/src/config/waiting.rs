//! `[queue]` and `[drain]`: what waits for what, and for how long.

use std::time::Duration;

use super::ConfigError;
use super::value::{MAX_SECONDS, seconds, within};

/// More than any engine runs at a time.
const MAX_IN_FLIGHT: u32 = 1 << 20;
/// More than any listener has connections.
const MAX_QUEUED: usize = 1 << 20;

section! { RawQueue, "`[queue]`: requests that wait for a rank, a line for each model.";
    /// Requests in flight on each rank beyond which others wait here. Absent: no limit, engines queue by themselves and
    /// know their memory. A limit slightly above what a rank runs at a time lets late requests go to the rank that is
    /// free then.
    max_in_flight: Option<u32> = None,
    /// Requests that may wait; further ones get 429.
    max_queued: usize = 1024,
    /// How long one may wait for room on a rank; then it gets 429.
    max_wait_seconds: f64 = 30.0,
    /// How long one may wait while no backend takes requests; then it gets 503. 0: not at all.
    wait_for_backend_seconds: f64 = 1.0,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct QueueRules {
    pub(crate) max_in_flight: Option<u32>,
    pub(crate) max_queued: usize,
    pub(crate) max_wait: Duration,
    pub(crate) wait_for_backend: Duration,
}

/// A time that may be nothing.
fn seconds_or_none(key: &str, value: f64) -> Result<Duration, ConfigError> {
    within(key, value, 0.0..=MAX_SECONDS).map(Duration::from_secs_f64)
}

pub(super) fn queue(raw: &RawQueue) -> Result<QueueRules, ConfigError> {
    if let Some(limit) = raw.max_in_flight.filter(|limit| !(1..=MAX_IN_FLIGHT).contains(limit)) {
        let cause = format!("{limit}, expected 1 to {MAX_IN_FLIGHT}, or none for no limit");
        return Err(ConfigError::value("queue.max_in_flight", cause));
    }
    if raw.max_queued > MAX_QUEUED {
        let cause = format!("{}, expected at most {MAX_QUEUED}", raw.max_queued);
        return Err(ConfigError::value("queue.max_queued", cause));
    }
    Ok(QueueRules {
        max_in_flight: raw.max_in_flight,
        max_queued: raw.max_queued,
        max_wait: seconds("queue.max_wait_seconds", raw.max_wait_seconds)?,
        wait_for_backend: seconds_or_none("queue.wait_for_backend_seconds", raw.wait_for_backend_seconds)?,
    })
}

section! { RawDrain, "`[drain]`: how the process ends when it is asked to (SIGTERM).";
    /// How long requests are still taken after `/readyz` turned 503, so that load balancers learn of it first.
    delay_seconds: f64 = 2.0,
    /// How long requests that run may go on then; what is left is closed with an error.
    grace_seconds: f64 = 25.0,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DrainRules {
    pub(crate) delay: Duration,
    pub(crate) grace: Duration,
}

pub(super) fn drain(raw: &RawDrain) -> Result<DrainRules, ConfigError> {
    Ok(DrainRules {
        delay: seconds_or_none("drain.delay_seconds", raw.delay_seconds)?,
        grace: seconds_or_none("drain.grace_seconds", raw.grace_seconds)?,
    })
}
