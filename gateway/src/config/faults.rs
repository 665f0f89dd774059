//! `[retry]`, `[breaker]`: the gateway's reaction when a backend fails a request.

use std::time::Duration;

use super::ConfigError;
use super::value::{any, positive, seconds, share, within};

/// An upper bound: no budget sustains more attempts.
const MAX_ATTEMPTS: u32 = 16;
/// Upper bound: no client waits longer than this for a response head.
const MAX_HOLD_SECONDS: f64 = 3600.0;
/// An upper bound: no gateway serves more.
const MAX_PER_SECOND: f64 = 1e6;

section! { RawRetry, "`[retry]`: retries a request on another backend as long as no part of the response has reached the client.";
    /// Maximum number of backends tried per request. 1: no retries.
    attempts: u32 = 3,
    /// Retry budget: the retries of the last 10 s may number up to this fraction of a model's requests, plus
    /// `budget_per_second`.
    budget_ratio: f64 = 0.2,
    /// Retries per second allowed in addition to `budget_ratio`, so that models with little traffic can retry too.
    budget_per_second: f64 = 10.0,
    /// Retry even if the engine may already have started: the connection broke before the response head, or the
    /// backend's probes failed while the response was pending. A generation may then run twice; the client receives
    /// one.
    after_send: bool = true,
    /// Response statuses that trigger a retry on another backend; if there is none, the response is relayed. 429 and
    /// 500 to 599 are allowed; with 500, a request that makes an engine fail is tried on others too.
    statuses: Vec<u16> = vec![429, 502, 503, 504],
    /// How long a response head is held back until the first chunk arrives, so that the request can be retried if that
    /// chunk is an error. 0: not held.
    hold_seconds: f64 = 5.0,
}

pub(super) fn retry(raw: RawRetry) -> Result<RawRetry, ConfigError> {
    within("retry.attempts", raw.attempts, 1..=MAX_ATTEMPTS)?;
    if let Some(status) = raw.statuses.iter().find(|status| !matches!(status, 429 | 500..=599)) {
        return Err(ConfigError::value("retry.statuses", format!("{status}, expected 429 or 500 to 599")));
    }
    share("retry.budget_ratio", raw.budget_ratio)?;
    within("retry.budget_per_second", raw.budget_per_second, 0.0..=MAX_PER_SECOND)?;
    within("retry.hold_seconds", raw.hold_seconds, 0.0..=MAX_HOLD_SECONDS)?;
    Ok(raw)
}

section! { RawBreaker => #[derive(Copy)] BreakerRules, "breaker",
    "`[breaker]`: a backend with consecutive failures receives no requests for a while, unless it is the last one.";
    /// Consecutive failures that open the breaker: connections refused or broken before a response, and 502 or 503
    /// whose body is not an engine's JSON. 0: never.
    failures: u32 = 5 => failures: u32 = any,
    /// Consecutive errors that open the breaker, provided that other backends answered at least half as many requests
    /// successfully: responses of 500 and above (except 501), failures that the engine reports in a response, responses
    /// that break off, and time-outs. Identical requests count once, unless another backend answers one of them
    /// successfully. 0: never.
    errors: u32 = 10 => errors: u32 = any,
    /// How long the breaker first stays open; doubled each time its trials fail, up to `longest_seconds`.
    open_seconds: f64 = 5.0 => open: Duration = seconds,
    /// Maximum time that the breaker stays open.
    longest_seconds: f64 = 60.0 => open_most: Duration = seconds,
    /// Number of concurrent trial requests when half-open.
    trials: u32 = 2 => trials: u32 = positive,
    /// Number of trials that must succeed before the backend receives its full share again.
    passes: u32 = 2 => passes: u32 = positive,
}

pub(super) fn breaker(raw: RawBreaker) -> Result<BreakerRules, ConfigError> {
    let rules = BreakerRules::check(raw)?;
    if rules.open_most < rules.open {
        let (open, most) = (rules.open.as_secs_f64(), rules.open_most.as_secs_f64());
        let cause = format!("{most}, expected at least breaker.open_seconds ({open})");
        return Err(ConfigError::value("breaker.longest_seconds", cause));
    }
    Ok(rules)
}
