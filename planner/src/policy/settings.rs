//! Settings of the adaptive policy.

/// The TTFT target for requests with one priority.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TtftTarget {
    /// The requests' priority.
    pub priority: u8,
    /// Seconds from arrival to the first token.
    pub seconds: f64,
}

/// Settings of [`Adaptive`](super::Adaptive). The defaults were tuned on seeds and hours that the table in
/// bench/switch/README.md does not use.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How long a gain is expected to last: this many seconds of it count in advance, and the rest only as it accrues.
    pub horizon_seconds: f64,
    /// Minimum gain, as a fraction of the step time. Smaller gains are noise: they neither justify a switch nor add to
    /// the regret.
    pub least_gain: f64,
    /// The time saved must exceed the cost of switching there and back by this factor.
    pub margin: f64,
    /// Minimum time between switches, regardless of their cause.
    pub dwell_seconds: f64,
    /// Window of the fast moving average of arrivals.
    pub fast_seconds: f64,
    /// Window of the slow moving average; a backlog of prompts is assumed to clear within this time.
    pub slow_seconds: f64,
    /// The KV guard closes a layout whose cache would fill beyond this fraction.
    pub guard_close: f64,
    /// The KV guard reopens a layout once its cache would fill to at most this fraction.
    pub guard_reopen: f64,
    /// Maximum number of prompt tokens that the engine computes per step.
    pub chunk_tokens: u32,
    /// Maximum number of sequences that the engine decodes at once.
    pub max_sequences: u32,
    /// TTFT targets by priority. Requests without a target never cause a switch.
    pub ttft: Vec<TtftTarget>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            horizon_seconds: 3.0,
            least_gain: 0.02,
            margin: 1.0,
            dwell_seconds: 1.0,
            fast_seconds: 0.5,
            slow_seconds: 3.0,
            guard_close: 0.95,
            guard_reopen: 0.85,
            chunk_tokens: 8192,
            max_sequences: 2048,
            ttft: Vec::new(),
        }
    }
}

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A value outside its range.
    #[error("{name} is {found}, expected {expected}")]
    Number {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: f64,
        /// The allowed range.
        expected: &'static str,
    },
    /// A priority with two targets.
    #[error("priority {priority} has two TTFT targets, expected one")]
    Priority {
        /// The priority.
        priority: u8,
    },
}

/// Maximum of all durations: one hour.
const MAX_SECONDS: f64 = 3600.0;

impl Settings {
    /// Checks every number.
    pub fn validate(&self) -> Result<(), SettingsError> {
        const POSITIVE: &str = "more than 0 and at most 3600";
        let from_zero = |found: f64| (0.0..=MAX_SECONDS).contains(&found);
        let seconds = |found: f64| found > 0.0 && from_zero(found);
        let share = |found: f64| (0.0..=1.0).contains(&found);
        let close = self.guard_close;
        let checks = [
            ("horizon_seconds", self.horizon_seconds, "0 to 3600", from_zero(self.horizon_seconds)),
            ("least_gain", self.least_gain, "0 to 1", share(self.least_gain)),
            ("margin", self.margin, "0 to 100", (0.0..=100.0).contains(&self.margin)),
            ("dwell_seconds", self.dwell_seconds, "0 to 3600", from_zero(self.dwell_seconds)),
            ("fast_seconds", self.fast_seconds, POSITIVE, seconds(self.fast_seconds)),
            ("slow_seconds", self.slow_seconds, POSITIVE, seconds(self.slow_seconds)),
            ("guard_close", close, "0 to 1", share(close)),
            ("guard_reopen", self.guard_reopen, "0 to guard_close", (0.0..=close).contains(&self.guard_reopen)),
            ("chunk_tokens", self.chunk_tokens.into(), "1 or more", self.chunk_tokens > 0),
            ("max_sequences", self.max_sequences.into(), "1 or more", self.max_sequences > 0),
        ];
        let targets =
            self.ttft.iter().map(|target| ("ttft seconds", target.seconds, POSITIVE, seconds(target.seconds)));
        if let Some((name, found, expected, _)) = checks.into_iter().chain(targets).find(|check| !check.3) {
            return Err(SettingsError::Number { name, found, expected });
        }
        let twice = |at: usize| self.ttft[..at].iter().any(|target| target.priority == self.ttft[at].priority);
        match (0..self.ttft.len()).find(|&at| twice(at)) {
            Some(at) => Err(SettingsError::Priority { priority: self.ttft[at].priority }),
            None => Ok(()),
        }
    }
}
