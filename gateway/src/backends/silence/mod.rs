//! Distinguishes a dead scheduler from a long prefill, by observing the running streams of a backend.
//!
//! A dead scheduler stops all of its streams at once, and probes that need it hang. A long prefill looks similar, but
//! its prompt is nearly always one of ours that was waiting for its first token when the streams fell silent; a prompt
//! that arrives later is computed in a later step, before which the streams would make progress. A backend is therefore
//! suspected when its streams have been silent for longer than those prompts should take at its measured prefill rate,
//! and a probe hangs too. Another client's prompt can still be the reason, so a suspected backend loses no requests;
//! new ones are sent to other backends if there are any. The first chunk or answered probe clears the suspicion, and
//! each false alarm doubles the patience.

use std::time::Duration;

use crate::backends::flow::FlowReading;

/// Allowed slowdown for the waiting prompts, relative to the average rate.
const SLOWER: f64 = 2.0;
/// Maximum number of false alarms counted; each one doubles the patience.
const MAX_ALARMS: u32 = 4;
/// Time without a false alarm after which one is forgiven.
const CALM: Duration = Duration::from_secs(600);
/// Half-life of the prefill rate, in seconds of compute time.
const RATE_SECONDS: f64 = 60.0;
/// Compute time added to the measured time, so that the first few prompts do not make the engine look fast.
const RATE_PRIOR_SECONDS: f64 = 0.5;

/// How long to wait before suspecting a scheduler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SilenceRules {
    /// How long streams may stay silent without an explanation.
    pub(crate) stall: Duration,
    /// Maximum patience after false alarms.
    pub(crate) most: Duration,
}

impl SilenceRules {
    /// Time between two checks.
    pub(crate) fn tick(&self) -> Duration {
        self.stall / 20
    }
}

/// The result of a check, if it changes the verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The scheduler looks dead.
    Suspected,
    /// The scheduler proved to be alive.
    Recovered,
}

/// The prefill rate in prompt tokens per second, measured while streams wait for their first chunk.
#[derive(Debug, Default)]
struct Rate {
    tokens: f64,
    seconds: f64,
    /// Seconds with waiting prompts since the last chunk. They count once a chunk shows that the engine was working.
    open_seconds: f64,
    /// Total computed prompt tokens at the last reading.
    known_tokens: Option<u64>,
}

impl Rate {
    fn observe(&mut self, elapsed: Duration, seen: &FlowReading) {
        if seen.waiting_streams > 0 {
            self.open_seconds += elapsed.as_secs_f64();
        }
        let known = self.known_tokens.replace(seen.computed_tokens).unwrap_or(seen.computed_tokens);
        self.tokens += seen.computed_tokens.saturating_sub(known) as f64;
        if seen.moved {
            self.seconds += std::mem::take(&mut self.open_seconds);
        }
        if self.seconds > RATE_SECONDS {
            self.seconds /= 2.0;
            self.tokens /= 2.0;
        }
    }

    /// Longest time that computing `tokens` prompt tokens should take; unbounded until any have been computed.
    fn time_of(&self, tokens: u64) -> Duration {
        if tokens == 0 {
            return Duration::ZERO;
        }
        let seconds = SLOWER * tokens as f64 * (self.seconds + RATE_PRIOR_SECONDS) / self.tokens;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// Tracks the streams of one backend over time.
#[derive(Debug, Default)]
pub(crate) struct Silence {
    rate: Rate,
    /// How long streams have been running without any response chunk.
    pub(crate) silent: Duration,
    /// Tokens of the prompts that were waiting when the streams fell silent.
    explaining_tokens: u64,
    /// How long the scheduler has gone without answering a probe.
    asked: Option<Duration>,
    suspected: bool,
    false_alarms: u32,
    calm: Duration,
}

impl Silence {
    /// Runs one check, `elapsed` after the previous one. If the gateway itself was delayed, only part of that time
    /// counts.
    pub(crate) fn observe(&mut self, rules: &SilenceRules, elapsed: Duration, seen: &FlowReading) -> Option<Change> {
        let elapsed = elapsed.min(rules.stall / 4);
        self.rate.observe(elapsed, seen);
        self.calm_down(elapsed);
        if seen.moved {
            return self.alive();
        }
        if self.suspected {
            return None;
        }
        if seen.running_streams == 0 {
            self.forget();
            return None;
        }
        let patience = (rules.stall * (1 << self.false_alarms)).min(rules.most.max(rules.stall));
        let at_first = self.silent <= patience / 8;
        let most = if at_first { u64::MAX } else { self.explaining_tokens };
        self.explaining_tokens = seen.waiting_tokens.min(most);
        self.silent += elapsed;
        if let Some(asked) = &mut self.asked {
            *asked += elapsed;
        }
        if self.silent >= patience / 3 {
            self.asked.get_or_insert(Duration::ZERO);
        }
        let unexplained = self.silent >= patience.saturating_add(self.rate.time_of(self.explaining_tokens));
        if unexplained && self.asked.is_some_and(|asked| asked >= patience / 2) {
            self.suspected = true;
            return Some(Change::Suspected);
        }
        None
    }

    /// Whether to probe the scheduler now.
    pub(crate) fn wants_answer(&self) -> bool {
        self.asked.is_some()
    }

    /// Records that the scheduler answered a probe, or that a chunk arrived.
    pub(crate) fn alive(&mut self) -> Option<Change> {
        self.forget();
        if !std::mem::take(&mut self.suspected) {
            return None;
        }
        self.false_alarms = (self.false_alarms + 1).min(MAX_ALARMS);
        self.calm = Duration::ZERO;
        Some(Change::Recovered)
    }

    /// The longest part of the silence that waiting prompts can explain.
    pub(crate) fn explained(&self) -> Duration {
        self.rate.time_of(self.explaining_tokens)
    }

    fn forget(&mut self) {
        self.silent = Duration::ZERO;
        self.asked = None;
    }

    fn calm_down(&mut self, elapsed: Duration) {
        self.calm += elapsed;
        if self.calm >= CALM {
            self.calm = Duration::ZERO;
            self.false_alarms = self.false_alarms.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests;
