//! A policy with its clock: fed with a unit's work, consulted, and notified of its decisions' outcomes.

use std::time::Instant;

use semmoe_planner::policy::{Adaptive, Cause, Decision, Event, Head, Layout, Stay, Step, SwitchPolicy, UnitView};

use super::Outcome;
use super::reading::{Load, MeanStep};
use crate::config::SwitchConfig;

/// Maximum number of an interval's steps that are passed to the policy; more of the same kind add no information.
const MAX_STEPS: u32 = 1000;
/// Maximum number of an interval's requests that are passed to the policy.
const MAX_ARRIVALS: u64 = 1000;

/// A set of ranks that switches as one.
pub(super) struct Unit {
    policy: Adaptive,
    began: Instant,
    /// KV tokens at the last decision, which a switch decided then moves.
    kv_tokens: u64,
}

/// The policy's decision, for display.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Verdict {
    pub(super) to: Option<Layout>,
    /// Fraction of the step time that the other layout would save, if both are known.
    pub(super) gain: Option<f64>,
    /// One sentence.
    pub(super) reason: String,
}

impl Unit {
    /// Creates a unit; returns `None` if the settings are invalid.
    pub(super) fn new(rules: &SwitchConfig) -> Option<Self> {
        Some(Self { policy: rules.policy().ok()?, began: Instant::now(), kv_tokens: 0 })
    }

    fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Feeds the policy with the requests that arrived and the total of their prompt tokens.
    pub(super) fn arrived(&mut self, requests: u64, tokens: u64) {
        if tokens == 0 {
            return;
        }
        let (at, requests) = (self.now(), requests.clamp(1, MAX_ARRIVALS));
        let prompt_tokens = u32::try_from(tokens / requests).unwrap_or(u32::MAX);
        (0..requests).for_each(|_| self.policy.observe(at, &Event::Arrived { prompt_tokens }));
    }

    /// Feeds the policy with the steps that ran in `layout`.
    pub(super) fn stepped(&mut self, layout: Layout, steps: &MeanStep) {
        let step =
            Step { layout, sequences: steps.sequences, prompt_tokens: steps.prompt_tokens, seconds: steps.seconds };
        let at = self.now();
        (0..steps.steps.min(MAX_STEPS)).for_each(|_| self.policy.observe(at, &Event::Stepped(step)));
    }

    /// Returns the action to take now. `heads`: the oldest waiting stream of each priority.
    pub(super) fn decide(&mut self, layout: Layout, load: &Load, heads: &[Head]) -> Verdict {
        self.kv_tokens = load.live_kv_tokens;
        let view = UnitView {
            layout,
            running: load.running,
            waiting: load.waiting,
            waiting_tokens: load.waiting_tokens,
            live_kv_tokens: load.live_kv_tokens,
            promised_kv_tokens: load.promised_kv_tokens,
            blocked: false,
            heads,
        };
        let at = self.now();
        match self.policy.decide(at, &view) {
            Decision::Switch(switch) => Verdict {
                to: Some(switch.to),
                gain: match switch.cause {
                    Cause::Gain { gain, .. } => Some(gain),
                    _ => None,
                },
                reason: reason_of(&switch.cause),
            },
            Decision::Stay(stay) => Verdict {
                to: None,
                gain: match stay {
                    Stay::Best { gain } => Some(gain),
                    _ => None,
                },
                reason: why(&stay),
            },
        }
    }

    /// Records the outcome of a switch that the policy decided. A switch that was only advised counts as failed, so
    /// that the policy continues from the old layout.
    pub(super) fn ended(&mut self, to: Layout, outcome: Option<&Outcome>) {
        let event = match outcome {
            Some(Outcome::Committed { seconds }) => {
                Event::Switched { to, seconds: *seconds, kv_tokens: self.kv_tokens }
            }
            _ => Event::Failed { to },
        };
        let at = self.now();
        self.policy.observe(at, &event);
    }
}

fn reason_of(cause: &Cause) -> String {
    match *cause {
        Cause::Gain { gain, regret, switch_seconds } => format!(
            "steps are {:.1}% shorter there; {regret:.2} request-seconds have been lost so far, and a switch takes {switch_seconds:.3} s",
            100.0 * gain
        ),
        Cause::Ttft { priority, here_seconds, there_seconds } => format!(
            "a request of priority {priority} gets its first token after {here_seconds:.2} s here and {there_seconds:.2} s there"
        ),
        Cause::Rule(rule) => rule.to_owned(),
    }
}

fn why(stay: &Stay) -> String {
    match stay {
        Stay::Fixed => "the layout is fixed".to_owned(),
        Stay::Idle => "no requests are running or waiting".to_owned(),
        Stay::Best { gain } => {
            format!("steps are {:.1}% {} there", 100.0 * gain.abs(), if *gain > 0.0 { "shorter" } else { "longer" })
        }
        Stay::Unpaid { saved, needed } => {
            format!("a switch would save {saved:.2} request-seconds, but must save {needed:.2} to pay off")
        }
        Stay::Dwell { left_seconds } => {
            format!("the last switch or failure is too recent: {left_seconds:.2} s left to wait")
        }
        Stay::Switching { to } => format!("it is switching to {}", to.name()),
        Stay::NoRoom(no_room) => no_room.to_string(),
        Stay::Unknown { layout, sequences } => {
            format!("the step time for {sequences} sequences is unknown for {}", layout.name())
        }
    }
}
