//! `[retry]`, `[breaker]`: what happens when a backend fails a request.

use std::time::Duration;

use super::ConfigError;
use super::value::{any, positive, seconds, share, within};

/// More attempts than any budget sustains.
const MAX_ATTEMPTS: u32 = 16;
/// Longer than clients wait for a response head.
const MAX_HOLD_SECONDS: f64 = 3600.0;
/// More than any gateway serves.
const MAX_PER_SECOND: f64 = 1e6;

section! { RawRetry, "`[retry]`: retries a request on another backend as long as no part of the response has reached the client.";
    /// Maximum number of backends that one request is sent to. 1: no retries.
    attempts: u32 = 3,
    /// Retries may add this share to a model's requests of the last 10 s...
    budget_ratio: f64 = 0.2,
    /// ...plus this many per second, so that a model with little traffic can retry too.
    budget_per_second: f64 = 10.0,
    /// Retry even if the engine may have begun: the connection broke before the response head, or the backend's probes
    /// failed while the response was pending. A generation may then run twice; the client receives one.
    after_send: bool = true,
    /// Response statuses on which another backend is tried. If there is none, the response is relayed. 429 and 500 to
    /// 599; with 500, a request that makes an engine fail is tried on others too.
    statuses: Vec<u16> = vec![429, 502, 503, 504],
    /// How long a response head is held for the first chunk, so that the request can be retried if that chunk is an
    /// error. 0: not held.
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
    "`[breaker]`: a backend whose requests fail in a row receives none for a while, unless it is the last one.";
    /// Consecutive failures that open it: connections refused or broken before a response, and 502 or 503 whose body is
    /// not an engine's JSON. 0: never.
    failures: u32 = 5 => failures: u32 = any,
    /// Consecutive errors that open it, while other backends answered at least half as many requests successfully:
    /// responses of 500 and above (except 501), failures that the engine reports in a response, responses that break
    /// off, and time-outs. Of equal requests only the first counts, unless another backend answers one of them
    /// successfully. 0: never.
    errors: u32 = 10 => errors: u32 = any,
    /// How long it stays open the first time; doubled each time its trials fail...
    open_seconds: f64 = 5.0 => open: Duration = seconds,
    /// ...up to this.
    longest_seconds: f64 = 60.0 => open_most: Duration = seconds,
    /// Concurrent trial requests afterwards.
    trials: u32 = 2 => trials: u32 = positive,
    /// Trials that must succeed before it receives its full share again.
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
